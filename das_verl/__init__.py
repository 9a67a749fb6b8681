"""Distribution-aware speculative rollouts for verl (DAS, arXiv 2511.13841)."""

__version__ = "0.1.0"
