"""When a drafted token pays."""

from __future__ import annotations

from numba import njit

# Beyond this price hardly any token qualifies, and looking for it would not be free.
HIGHEST_PRICE = 0.8
NOTHING = 2.0  # a price that no token can pay


@njit(nogil=True, cache=True, error_model="numpy")
def draft_prices(remaining, others, verify_tokens, accepted, drafted, out):
    """How likely a drafted token must be to be accepted, for its verification to pay in this engine step.

    The latency of a forward pass is close to affine in its tokens, ``c_base + c_tok * tokens`` (DAS, arXiv
    2511.13841). Of ``V = c_base / c_tok``, which a step costs before its first token, each request carries the share
    ``s = w / sum(w)`` that it has of all the work left: the step is made above all for those that will be among the
    last. A request with ``D`` drafted tokens of which ``G`` are accepted gains ``1 + G`` tokens for
    ``V s + 1 + D``, in units of ``c_tok``. One more draft token costs 1 and gains its chance ``p`` of being accepted,
    so it lowers the cost of a token where ``p > (1 + G) / (V s + 1 + D)``: a single straggler drafts nearly
    everything, a large batch only what is nearly sure. With ``G`` and ``D`` as they were lately, this price converges
    to the best one (Dinkelbach's method for ratios, Management Science 13(7), 1967).

    Parameters
    ----------
    remaining : ndarray of float64, shape (n,)
        ``w``, tokens that each request is expected to have still to generate, above 0.
    others : int
        Requests in the batch besides; they count with the mean of these.
    verify_tokens : float
        ``V``, the number of tokens whose verification takes as long as the rest of a forward pass.
    accepted, drafted : ndarray of float64, shape (n,)
        ``G`` and ``D``, tokens per step, means over what was lately.
    out : ndarray of float64, shape (n,)
        The prices, in [0, 0.8]; 2 where drafting is not worth the attempt.

    Returns
    -------
    bool
        Whether any request may draft.
    """
    n = remaining.size
    total = 0.0
    for i in range(n):
        total += remaining[i]
    total *= (n + others) / max(n, 1)
    any_may = False
    for i in range(n):
        price = (1 + accepted[i]) / (verify_tokens * remaining[i] / total + 1 + drafted[i])
        may = price <= HIGHEST_PRICE
        out[i] = price if may else NOTHING
        any_may |= may
    return any_may
