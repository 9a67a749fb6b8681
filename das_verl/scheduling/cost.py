"""What an engine step costs, fitted to the steps that an engine has made."""

from __future__ import annotations

import math

import numpy as np

_PER_BUCKET = 9  # newest steps that a bucket's median is taken over
_RATIO = 1.3  # from the requests, or drafted tokens, of one bucket to those of the next
_REFIT_EVERY = 16
_OLD = 2000  # steps after which a bucket that got no new one is left out
_NEAR = 0.5  # standard deviation, in logarithms of requests, of how buckets weigh
# What is believed before steps have told better: a step is worth so many drafted tokens, give or take as much, and a
# jump is this share of it at most; against errors of the buckets' medians.
_VERIFY_TOKENS = 64.0
_JUMP = 0.3
_ERROR = 0.2
_MOST = 1024  # no token is thought cheaper than one in so many of a step without drafts


class StepCost:
    """Latency of an engine step, learnt online: ``c_base + c_tok * drafted`` (DAS, arXiv 2511.13841) where it stands.

    A request costs more than a token, by its row in every layer above the kernels and by its context, and verifying
    anything at all costs something of its own. So the latency of ``n`` requests with ``d`` drafted tokens is taken for
    ``a + b n + c_tok d``, and ``jump`` more if ``d > 0``. Steps are sorted into buckets by ``n`` and ``d``, each with
    the newest few. The fit goes through the buckets' medians, so that neither a rare slow step nor the many alike
    steps of a long rollout bend it, and weighs errors relative to the latency. It holds for about as many requests as
    the newest step had: over a wider range latency is a curve, and what counts is what a few tokens more cost now.

    Parameters
    ----------
    requests, drafted : int
        Most requests of a step and most drafted tokens; larger steps are not looked at.
    """

    def __init__(self, requests: int, drafted: int) -> None:
        self._most = (requests, drafted)
        shape = tuple(_bucket(m) + 1 for m in self._most)
        self._seconds = np.full((*shape, _PER_BUCKET), np.inf)
        self._mean = np.zeros((*shape, 2))  # requests and drafted tokens, means of the newest steps
        self._seen = np.zeros(shape, np.int64)
        self._newest = np.zeros(shape, np.int64)
        self._steps = 0
        self._fitted: tuple[float, float, float, float] | None = None  # a, b, c_tok, jump

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        """Note a step of ``requests`` requests that verified ``drafted`` tokens besides; nonsense is left out."""
        if not (0 < requests <= self._most[0] and 0 <= drafted <= self._most[1] and 0 < seconds < math.inf):
            return
        bucket = _bucket(requests), _bucket(drafted)
        seen = self._seen[bucket]
        self._seconds[(*bucket, seen % _PER_BUCKET)] = seconds
        self._mean[bucket] += (np.array([requests, drafted]) - self._mean[bucket]) / min(seen + 1, _PER_BUCKET)
        self._seen[bucket] += 1
        self._steps += 1
        self._newest[bucket] = self._steps
        if self._steps % _REFIT_EVERY == 0:
            self._fit(requests)

    def in_tokens(self, requests: int) -> tuple[float, float]:
        """Return what a step costs in units of ``c_tok``; NaN as long as the steps seen do not tell.

        Returns
        -------
        verify_tokens : float
            ``V``: a step of ``requests`` requests without drafts costs as much as ``V + requests`` drafted tokens.
        jump_tokens : float
            What a step with drafts costs besides.
        """
        if self._fitted is None:
            return math.nan, math.nan
        base, per_request, per_token, jump = self._fitted
        plain = base + per_request * requests
        per_token = min(max(per_token, plain / _MOST), plain / requests)
        return plain / per_token - requests, jump / per_token

    def _fit(self, now: int) -> None:
        used = (self._seen >= 3) & (self._steps - self._newest < _OLD)
        requests, drafted = self._mean[used].T
        if len(np.unique(np.rint(drafted))) < 3:
            return
        middle = (np.minimum(self._seen[used], _PER_BUCKET) - 1) // 2
        seconds = np.sort(self._seconds[used], axis=1)[np.arange(len(middle)), middle]
        near = np.exp(-0.25 * (np.log(requests / now) / _NEAR) ** 2)
        typical = float(np.sum(near * seconds) / np.sum(near))
        # In units in which all four are of like size.
        unit = np.array([1.0, now, _VERIFY_TOKENS + now, 1.0])
        columns = np.stack([np.ones_like(requests), requests, drafted, drafted > 0], axis=1) / unit
        weight = near * typical / seconds / _ERROR
        beliefs = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1 / _JUMP]]
        rows = np.vstack([columns * weight[:, None], beliefs])
        found = np.linalg.lstsq(rows, np.concatenate([weight * seconds / typical, [1.0, 0.0]]), rcond=1e-6)[0]
        base, per_request, per_token, jump = (found * typical / unit).tolist()
        if base + per_request * now > 0:
            self._fitted = base, per_request, per_token, max(jump, 0.0)


def _bucket(count: int) -> int:
    return int(math.log1p(count) / math.log(_RATIO))
