"""What an engine step costs, fitted to the steps that an engine has made."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_PER_BUCKET = 9  # newest steps that a bucket's median is taken over
_RATIO = 1.15  # from the tokens of one bucket to those of the next
_REFIT_EVERY = 16
_OLD = 2000  # steps after which a bucket that got no new one is left out
_LEAST_SPREAD = 1.5  # ratio of token counts below which a slope would be noise


class StepCost:
    """Latency of an engine step as ``c_base + c_tok * tokens`` (DAS, arXiv 2511.13841), learnt online.

    Steps are sorted into buckets by their tokens, each with the newest few. The line goes through the buckets'
    medians, so that neither a rare slow step nor the many alike steps of a long rollout bend it, and weighs errors
    relative to the latency.

    Parameters
    ----------
    largest : int
        Steps of more tokens than this are not looked at: far from where drafts are added or left out, latency need
        not be on the same line.

    Attributes
    ----------
    base, per_token : float
        ``c_base`` and ``c_tok``, seconds; NaN as long as the steps seen do not tell them apart.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.base = self.per_token = math.nan
        buckets = int(math.log(max(largest, 1)) / math.log(_RATIO)) + 1
        self._tokens = np.full((buckets, _PER_BUCKET), np.inf)
        self._seconds = np.full((buckets, _PER_BUCKET), np.inf)
        self._seen = np.zeros(buckets, np.int64)
        self._newest = np.zeros(buckets, np.int64)
        self._steps = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Note a step that verified ``tokens`` tokens in all and took ``seconds``; nonsense is left out."""
        if not (0 < tokens <= self.largest and 0 < seconds < math.inf):
            return
        bucket = int(math.log(tokens) / math.log(_RATIO))
        at = self._seen[bucket] % _PER_BUCKET
        self._tokens[bucket, at] = tokens
        self._seconds[bucket, at] = seconds
        self._seen[bucket] += 1
        self._steps += 1
        self._newest[bucket] = self._steps
        if self._steps % _REFIT_EVERY == 0:
            self._fit()

    @property
    def verify_tokens(self) -> float:
        """``c_base / c_tok``: tokens verified in the time that the rest of a step takes; NaN if not known yet."""
        return self.base / self.per_token

    def _fit(self) -> None:
        used = np.flatnonzero((self._seen >= 3) & (self._steps - self._newest < _OLD))
        tokens, seconds = (_medians(a[used], self._seen[used]) for a in (self._tokens, self._seconds))
        if len(used) < 2 or tokens[-1] < _LEAST_SPREAD * tokens[0]:
            return
        weight = 1 / seconds**2
        mean_t, mean_s = (np.average(x, weights=weight) for x in (tokens, seconds))
        slope = float(np.sum(weight * (tokens - mean_t) * (seconds - mean_s)) / np.sum(weight * (tokens - mean_t) ** 2))
        # Noise can turn the line; a token is never free, nor a step without tokens.
        fastest = float(np.min(seconds / tokens))
        self.per_token = min(max(slope, 1e-4 * fastest), fastest)
        self.base = max(float(mean_s - self.per_token * mean_t), 0.0)


def _medians(values: NDArray[np.float64], seen: NDArray[np.int64]) -> NDArray[np.float64]:
    """Lower median of each row's first ``seen`` values; the rest are infinite."""
    middle = (np.minimum(seen, values.shape[1]) - 1) // 2
    return np.sort(values, axis=1)[np.arange(len(values)), middle]
