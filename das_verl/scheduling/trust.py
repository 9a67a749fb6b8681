"""How far the drafter's predictions hold, prompt by prompt: the distribution-aware filter (DAS, arXiv 2511.13841)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

_PRIOR = 8.0  # expected tokens that all prompts' share counts for beside a prompt's own
_PRIOR_ALL = 32.0  # expected tokens that a share of 1 counts for beside all that were seen
_FADING = 0.98
_LOWEST, _HIGHEST = 1e-3, 1.5


class Trust:
    """Accepted draft tokens as a share of those that were expected to be accepted, per prompt.

    The drafter's acceptance model is the same for all prompts. Where a prompt's tree tells little of what the policy
    says now, less is accepted than expected, so its tokens must promise more, and at last nothing is drafted from it.
    What is known fades, so that drafting is tried again, and goes when the prompt's tree does.
    """

    def __init__(self) -> None:
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._seen = np.zeros((64, 2))  # accepted, expected
        self._all = np.full(2, _PRIOR_ALL)

    def row(self, key: Hashable) -> int:
        """Return the row of a prompt, a new one if it has none."""
        if key not in self._rows:
            self._rows[key] = row = self._free.pop() if self._free else len(self._rows)
            if row >= len(self._seen):
                self._seen = np.concatenate([self._seen, np.zeros_like(self._seen)])
            self._seen[row] = 0.0
        return self._rows[key]

    def forget(self, keys: Iterable[Hashable] | None) -> None:
        """Give up the rows of prompts; None for all."""
        for key in list(self._rows) if keys is None else keys:
            row = self._rows.pop(key, None)
            if row is not None:
                self._free.append(row)

    def observe(self, rows: NDArray[np.int64], accepted: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
        """Note what became of drafts: the tokens accepted and expected to be, each of shape (n,)."""
        np.add.at(self._seen, rows, np.stack([accepted, expected], axis=1))
        self._all += accepted.sum(), expected.sum()

    def fade(self) -> None:
        """Let what was seen count a little less from now on."""
        self._seen *= _FADING
        self._all = _PRIOR_ALL + (self._all - _PRIOR_ALL) * _FADING

    def shares(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return by how much to multiply the predictions for prompts, in [0.001, 1.5]."""
        accepted, expected = self._seen[rows].T
        return np.clip((accepted + _PRIOR * self._all[0] / self._all[1]) / (expected + _PRIOR), _LOWEST, _HIGHEST)
