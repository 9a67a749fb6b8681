"""How much to draft, and which server runs what. Knows no framework."""

from das_verl.scheduling.budget import draft_prices
from das_verl.scheduling.cost import StepCost
from das_verl.scheduling.lengths import Lengths
from das_verl.scheduling.placement import Placement, longest_first
from das_verl.scheduling.trust import Trust

__all__ = ["Lengths", "Placement", "StepCost", "Trust", "draft_prices", "longest_first"]
