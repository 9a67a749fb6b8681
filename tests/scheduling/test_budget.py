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
