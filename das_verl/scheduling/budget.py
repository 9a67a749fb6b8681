"""How many tokens a request may draft."""


def draft_budget(running: int, verify_tokens: int, max_draft: int) -> int:
    """Return how many tokens each of ``running`` requests may draft in an engine step.

    The requests share evenly the draft tokens that one forward verifies almost for free; with too many of them
    the share is zero and drafting costs nothing. Forward latency is close to affine in its tokens (DAS, arXiv
    2511.13841), so that number is about ``c_base / c_tok``.

    Parameters
    ----------
    running : int
        Requests in the batch of the engine step.
    verify_tokens : int
        Draft tokens of all of them together that one forward verifies almost for free.
    max_draft : int
        Most tokens for one request.
    """
    return min(max_draft, verify_tokens // max(1, running))
