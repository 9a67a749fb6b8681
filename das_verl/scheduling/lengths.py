"""How long responses get: per prompt from its past rollouts, while they run from what is generated already."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

import numpy as np
from numba import njit
from numpy.typing import NDArray

SHORT, MEDIUM, LONG, UNSEEN = range(4)
_PER_PROMPT = 16  # newest lengths of a prompt that are looked at
_REMEMBERED = 4096  # newest lengths of all prompts
_UNKNOWN = 512.0  # tokens, as long as nothing has ended
# Responses to one prompt differ by about this much (standard deviation of the logarithm), so that a length a little
# beyond all past ones is not thought impossible. Each past length stands for three, which have that deviation.
_SPREAD = 0.35
_POINTS = np.exp(_SPREAD * np.array([-(1.5**0.5), 0.0, 1.5**0.5]))
LIKELY = _PER_PROMPT * len(_POINTS)


class Lengths:
    """Lengths of past responses by prompt, and the classes Short, Medium and Long (DAS, arXiv 2511.13841).

    Parameters
    ----------
    medium, long : float
        Responses above these are Medium and Long: below 1 a share of all responses, else tokens.
    """

    def __init__(self, medium: float = 0.5, long: float = 0.8) -> None:
        self._bounds = (medium, long)
        self._by_key: dict[Hashable, deque[int]] = {}
        self._all: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # initial class, length
        self._stale = True
        self._thresholds = (np.inf, np.inf)
        self._prior = np.full(_PER_PROMPT, _UNKNOWN)
        self._by_class = [np.empty(0)] * 4  # lengths, by initial class

    def add(self, key: Hashable, lengths: Iterable[int]) -> None:
        """Note how long responses to a prompt have become, in tokens, oldest first."""
        of_key = self._by_key.setdefault(key, deque(maxlen=_PER_PROMPT))
        first = self.initial_class(key)
        for length in lengths:
            self._all.append((first, length))
            of_key.append(length)
            self._stale = True

    def forget(self, keys: Iterable[Hashable] | None) -> None:
        """Forget prompts, None for all; what their responses say of all prompts stays."""
        for key in list(self._by_key) if keys is None else keys:
            self._by_key.pop(key, None)

    def likely(self, key: Hashable) -> NDArray[np.float64]:
        """Return `LIKELY` equally likely lengths of a prompt's next response; without history it is like all."""
        self._refresh()
        known = self._by_key.get(key)
        past = np.resize(np.array(known, np.float64), _PER_PROMPT) if known else self._prior
        return np.multiply.outer(past, _POINTS).ravel()

    @property
    def thresholds(self) -> tuple[float, float]:
        """Tokens above which a response is Medium and Long; infinite as long as no response has ended."""
        self._refresh()
        return self._thresholds

    def initial_class(self, key: Hashable) -> int:
        """Return the class that a prompt's history gives its next response; `UNSEEN` without history."""
        known = self._by_key.get(key)
        if not known:
            return UNSEEN
        medium, long = self.thresholds
        middle = float(np.median(known))
        return LONG if middle > long else MEDIUM if middle > medium else SHORT

    def classes(self, initial: NDArray[np.int64], done: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the likeliest classes of running requests, by P(class | length so far, initial class).

        Parameters
        ----------
        initial : ndarray of int64, shape (n,)
            :meth:`initial_class` of each request's prompt.
        done : ndarray of int64, shape (n,)
            Tokens generated so far.

        Returns
        -------
        ndarray of int64, shape (n,)
            `SHORT`, `MEDIUM` or `LONG`.
        """
        self._refresh()
        medium, long = self._thresholds
        result = np.empty(len(initial), np.int64)
        for first in (SHORT, MEDIUM, LONG, UNSEEN):
            rows = np.flatnonzero(initial == first)
            lengths = self._by_class[first]
            # How many responses became longer than this, and than this and the classes below.
            beyond = [
                len(lengths) - np.searchsorted(lengths, np.maximum(done[rows], bound), "right")
                for bound in (0.0, medium, long)
            ]
            counts = np.stack([beyond[0] - beyond[1], beyond[1] - beyond[2], beyond[2]])
            # Where none became so long, what its length has made it, if not its history.
            reached = (done[rows] > medium).astype(np.int64) + (done[rows] > long)
            least = MEDIUM if first == UNSEEN else first
            result[rows] = np.where(counts.any(axis=0), counts.argmax(axis=0), np.maximum(least, reached))
        return result

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        first, lengths = np.array(self._all, np.int64).reshape(-1, 2).T
        if len(lengths):
            self._prior = np.quantile(lengths, (np.arange(_PER_PROMPT) + 0.5) / _PER_PROMPT)
            medium, long = (float(np.quantile(lengths, b)) if b < 1 else float(b) for b in self._bounds)
            self._thresholds = (medium, max(medium, long))
        self._by_class = [np.sort(lengths[first == c]) for c in (SHORT, MEDIUM, LONG, UNSEEN)]


@njit(nogil=True, cache=True)
def remaining(likely, done, end, out):
    """Expect how many tokens running requests have still to generate, at least 1 each.

    Parameters
    ----------
    likely : ndarray of float64, shape (n, m)
        Lengths of each request, equally likely before it started, as :meth:`Lengths.likely` returns them.
    done : ndarray of int64, shape (n,)
        Tokens generated so far.
    end : ndarray of int64, shape (n,)
        Most tokens that each may generate.
    out : ndarray of float64, shape (n,)
    """
    for i in range(done.size):
        total = 0.0
        longer = 0
        for length in likely[i]:
            if length > done[i]:
                total += min(length, end[i]) - done[i]
                longer += 1
        # Longer than all that was thought likely: as if it could end at any time.
        expected = total / longer if longer else 0.5 * _SPREAD * done[i]
        out[i] = max(1.0, min(expected, end[i] - done[i]))
