"""Prices of draft tokens against brute force."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from das_verl.scheduling import draft_prices
from das_verl.scheduling.budget import HIGHEST_PRICE, NOTHING

chances = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12)


def prices_of(remaining, verify_tokens, accepted=None, drafted=None, others=0) -> np.ndarray:
    n = len(remaining)
    accepted, drafted = (np.zeros(n) if a is None else np.asarray(a, float) for a in (accepted, drafted))
    out = np.empty(n)
    any_may = draft_prices(np.asarray(remaining, float), others, float(verify_tokens), accepted, drafted, out)
    assert any_may == (out <= HIGHEST_PRICE).any()
    return out


def cost_of_a_token(share: float, probs) -> float:
    return (share + 1 + len(probs)) / (1 + sum(probs))


@given(st.integers(1, 400), st.integers(1, 1000), st.floats(0, 1))
def test_a_token_above_the_price_pays_and_none_below_does(running, verify_tokens, prob):
    price = prices_of([100.0] * running, verify_tokens)[0]
    plain = cost_of_a_token(verify_tokens / running, [])
    drafted = cost_of_a_token(verify_tokens / running, [prob])
    if price == NOTHING:
        assert prob < HIGHEST_PRICE or drafted > 0.9 * plain
    elif not np.isclose(prob, price):
        assert (drafted < plain) == (prob > price)


def test_stragglers_draft_nearly_everything_and_large_batches_nothing():
    assert prices_of([10.0], 256)[0] < 0.01
    assert (prices_of([10.0] * 2000, 256) == NOTHING).all()


def test_who_has_more_left_to_do_pays_less():
    prices = prices_of([10.0, 100.0, 1000.0], 30)
    assert prices[0] > prices[1] > prices[2]


def test_the_price_rises_with_the_batch_and_requests_without_drafts_count():
    prices = [prices_of([1.0] * n, 256)[0] for n in range(1, 1000)]
    assert prices == sorted(prices)
    assert prices_of([1.0] * 4, 256, others=60)[0] == prices[63]


@given(st.lists(st.tuples(st.floats(1, 1e4), chances), min_size=1, max_size=8), st.integers(1, 500))
def test_with_what_was_accepted_lately_the_prices_converge_to_the_best_ones(requests, verify_tokens):
    # How much each request drafts of what it has on offer, against trying every length.
    remaining = np.array([w for w, _ in requests])
    offers = [sorted(c, reverse=True) for _, c in requests]
    gains = [np.cumsum([0, *c]) for c in offers]
    drafted = np.zeros(len(requests), int)
    for _ in range(20):
        accepted = [g[d] for g, d in zip(gains, drafted, strict=True)]
        prices = prices_of(remaining, verify_tokens, accepted, drafted)
        drafted = np.array([sum(p > price for p in c) for price, c in zip(prices, offers, strict=True)])
    shares = verify_tokens * remaining / remaining.sum()
    for share, offer, d, price in zip(shares, offers, drafted, prices, strict=True):
        if price < NOTHING:
            costs = [cost_of_a_token(share, offer[:k]) for k in range(len(offer) + 1)]
            assert np.isclose(costs[d], min(costs))


def test_small_batches_reach_the_best_throughput_of_all_drafts():
    # Alike requests: then the sum that each minimises for itself is the batch's time for a token.
    offer = [0.9, 0.6, 0.35, 0.1]
    gain = np.cumsum([0, *offer])
    for running, verify_tokens in itertools.product((1, 2, 3), (2, 5, 20, 80)):
        best = max(
            (running + sum(gain[d] for d in drafts)) / (verify_tokens + running + sum(drafts))
            for drafts in itertools.product(range(5), repeat=running)
        )
        drafted = 0
        for _ in range(20):
            n = [1.0] * running
            price = prices_of(n, verify_tokens, [gain[drafted]] * running, [drafted] * running)[0]
            drafted = sum(p > price for p in offer)
        if price < NOTHING:
            assert np.isclose((1 + gain[drafted]) * running / (verify_tokens + running * (1 + drafted)), best)


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 128), st.floats(0, 1)), max_size=300),
    st.floats(0, 1e9),
    st.integers(0, 1000),
)
def test_any_input_gives_prices(rows, verify_tokens, others):
    remaining, drafted, rate = np.array(rows, float).reshape(-1, 3).T.copy()
    prices = prices_of(remaining, verify_tokens, drafted * rate, drafted, others)
    assert ((prices == NOTHING) | ((prices >= 0) & (prices <= HIGHEST_PRICE))).all()
