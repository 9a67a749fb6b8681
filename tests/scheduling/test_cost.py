import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das_verl.scheduling import StepCost


@pytest.mark.parametrize(("base", "per_token"), [(8e-3, 25e-6), (30e-3, 2e-3), (4.6e-3, 1e-4)])
def test_finds_the_line_in_spite_of_noise_and_slow_steps(base, per_token):
    rng = np.random.default_rng(0)
    cost = StepCost(largest=4096)
    for _ in range(400):
        tokens = int(rng.integers(8, 500))
        slow = 20 if rng.random() < 0.1 else 1
        cost.observe(tokens, slow * (base + per_token * tokens) * rng.lognormal(0, 0.1))
    assert cost.verify_tokens == pytest.approx(base / per_token, rel=0.35)


def test_follows_when_the_cost_changes():
    rng = np.random.default_rng(0)
    cost = StepCost(largest=4096)
    for base in (5e-3, 20e-3):
        for _ in range(3000):
            tokens = int(8 * 60 ** rng.random())
            cost.observe(tokens, base + 1e-4 * tokens)
    assert cost.verify_tokens == pytest.approx(200, rel=0.05)


def test_knows_nothing_before_steps_differ():
    cost = StepCost(largest=4096)
    for _ in range(100):
        cost.observe(64, 0.01)
    assert math.isnan(cost.verify_tokens)


def test_steps_beyond_the_largest_do_not_count():
    cost = StepCost(largest=100)
    for tokens in [8, 16, 32, 64, 5000] * 40:
        cost.observe(tokens, 0.01 + 1e-3 * min(tokens, 100))
    assert cost.verify_tokens == pytest.approx(10, rel=0.05)


@given(st.lists(st.tuples(st.integers(-5, 10_000), st.floats(allow_nan=True, allow_infinity=True)), max_size=200))
def test_any_input_gives_a_cost_that_can_be_used_or_none(steps):
    cost = StepCost(largest=5000)
    for tokens, seconds in steps:
        cost.observe(tokens, seconds)
    assert math.isnan(cost.verify_tokens) or (cost.per_token > 0 and 0 <= cost.verify_tokens < math.inf)
