"""Drafts from per-problem suffix trees; needs numpy and numba alone."""

from das_verl.drafter.store import Request, StoreStats, TreeStore
from das_verl.drafter.tree import Cursor, Draft, SuffixTree

__all__ = ["Cursor", "Draft", "Request", "StoreStats", "SuffixTree", "TreeStore"]
