"""How much to draft, and where. Knows no framework."""

from das_verl.scheduling.budget import draft_price
from das_verl.scheduling.cost import StepCost

__all__ = ["StepCost", "draft_price"]
