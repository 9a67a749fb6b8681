"""How much to draft, and where. Knows no framework."""

from das_verl.scheduling.budget import draft_price

__all__ = ["draft_price"]
