"""How much to draft, and where. Knows no framework."""

from das_verl.scheduling.budget import draft_budget

__all__ = ["draft_budget"]
