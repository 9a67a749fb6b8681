"""When a drafted token pays."""

# Beyond this price hardly any token qualifies, and looking for it would not be free.
_HIGHEST_PRICE = 0.8


def draft_price(running: int, verify_tokens: float, accepted: float = 0.0, drafted: float = 0.0) -> float | None:
    """Return how likely a drafted token must be to be accepted, for its verification to pay in this engine step.

    The latency of a forward pass is close to affine in its tokens, ``c_base + c_tok * tokens`` (DAS, arXiv
    2511.13841). With ``V = c_base / c_tok``, a step of ``n`` requests, each with ``D`` drafted tokens of which ``G``
    are accepted, gains ``n (1 + G)`` tokens in a time of ``V + n (1 + D)``, in units of ``c_tok``. One more draft token
    costs 1 and gains its chance ``p`` of being accepted, so it raises tokens per time where
    ``p > n (1 + G) / (V + n (1 + D))``: a single straggler drafts nearly everything, a large batch only what is nearly
    sure. With ``G`` and ``D`` as they were lately, this price converges to the best one (Dinkelbach's method for
    ratios, Management Science 13(7), 1967).

    Parameters
    ----------
    running : int
        Requests in the batch of the engine step, ``n``.
    verify_tokens : float
        ``V``, the number of tokens whose verification takes as long as the rest of a forward pass.
    accepted, drafted : float
        ``G`` and ``D``, tokens per request and step, means over what was lately.

    Returns
    -------
    float or None
        The price, in [0, 0.8]; None where drafting is not worth the attempt.
    """
    price = running * (1 + accepted) / (verify_tokens + running * (1 + drafted))
    return price if price <= _HIGHEST_PRICE else None
