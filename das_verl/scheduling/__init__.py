"""How much to draft, and where. Knows no framework."""

from das_verl.scheduling.budget import draft_prices
from das_verl.scheduling.cost import StepCost
from das_verl.scheduling.lengths import Lengths
from das_verl.scheduling.trust import Trust

__all__ = ["Lengths", "StepCost", "Trust", "draft_prices"]
