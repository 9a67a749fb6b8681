import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from das_verl.scheduling import draft_price


def tokens_per_time(running: int, verify_tokens: int, probs: list[float]) -> float:
    return (running + sum(probs)) / (verify_tokens + running + len(probs))


@settings(derandomize=True)
@given(st.integers(1, 400), st.integers(1, 1000), st.floats(0, 1))
def test_a_token_above_the_price_raises_the_throughput_and_none_below_does(running, verify_tokens, prob):
    price = draft_price(running, verify_tokens)
    if price is None:
        assert running > verify_tokens
        return
    plain = tokens_per_time(running, verify_tokens, [])
    drafted = tokens_per_time(running, verify_tokens, [prob])
    if not np.isclose(prob, price):
        assert (drafted > plain) == (prob > price)


def test_stragglers_draft_nearly_everything_and_large_batches_nothing():
    assert draft_price(1, 256) < 0.01
    assert draft_price(2000, 256) is None


def test_the_price_rises_with_the_batch():
    prices = [draft_price(n, 256) for n in range(1, 1000)]
    assert prices == sorted(prices)


@settings(derandomize=True)
@given(st.integers(1, 64), st.integers(1, 500), st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12))
def test_with_what_was_accepted_lately_the_price_converges_to_the_best_one(running, verify_tokens, chances):
    # Every request has the same chances on offer; the best set to draft, by brute force over thresholds.
    chances.sort(reverse=True)
    gains = np.cumsum([0, *chances])
    rates = running * (1 + gains) / (verify_tokens + running * (1 + np.arange(len(gains))))
    accepted = drafted = 0.0
    for _ in range(20):
        price = draft_price(running, verify_tokens, accepted, drafted)
        if price is None:
            break
        drafted = sum(p > price for p in chances)
        accepted = gains[drafted]
    if price is not None:
        assert np.isclose(rates[drafted], rates.max())
