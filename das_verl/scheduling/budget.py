"""When a drafted token pays."""

# Beyond this price hardly any token qualifies, and looking for it would not be free.
_HIGHEST_PRICE = 0.8


def draft_price(running: int, verify_tokens: int) -> float | None:
    """Return how likely a drafted token must be to be accepted, for its verification to pay in this engine step.

    The latency of a forward pass is close to affine in its tokens, ``c_base + c_tok * tokens`` (DAS, arXiv
    2511.13841). With ``V = c_base / c_tok``, a step of ``n`` requests without drafts gains ``n`` tokens in a time of
    ``V + n``, in units of ``c_tok``. A draft token costs 1 more and gains its chance ``p`` of being accepted, so it
    raises tokens per time where ``p > n / (V + n)``: a single straggler drafts nearly everything, a large batch
    only what is nearly sure.

    Parameters
    ----------
    running : int
        Requests in the batch of the engine step, ``n``.
    verify_tokens : int
        ``V``, the number of tokens whose verification takes as long as the rest of a forward pass.

    Returns
    -------
    float or None
        The price, in [0, 0.8]; None where drafting is not worth the attempt.
    """
    price = running / (verify_tokens + running)
    return price if price <= _HIGHEST_PRICE else None
