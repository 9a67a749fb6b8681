"""The cost of an engine step, found in spite of what real steps are like."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das_verl.scheduling import StepCost

# Seconds: base, per request, per drafted token, any draft. A 7B model on an H100, a small one on two CPU cores.
GPU = (8e-3, 25e-6, 25e-6, 0.3e-3)
CPU = (1.9e-3, 0.11e-3, 0.037e-3, 0.2e-3)


def latency(cost: tuple[float, ...], requests: int, drafted: int) -> float:
    base, per_request, per_token, jump = cost
    return base + per_request * requests + per_token * drafted + (jump if drafted else 0)


def rollout(seen: StepCost, cost: tuple[float, ...], seed: int = 0, last: int = 1) -> None:
    """A batch that gets smaller and drafts more; one step in 20 is far too slow, all are noisy."""
    rng = np.random.default_rng(seed)
    steps = 1500
    for step in range(steps):
        requests = last + int((128 - last) * (1 - step / steps))
        drafted = int(requests * rng.integers(0, 3 + 8 * step // steps))
        times = 20 if rng.random() < 0.05 else 1
        seen.observe(requests, drafted, times * latency(cost, requests, drafted) * rng.lognormal(0, 0.1))


@pytest.mark.parametrize("cost", [GPU, CPU])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("last", [16, 64])
def test_finds_what_a_token_costs_in_spite_of_noise_and_slow_steps(cost, seed, last):
    seen = StepCost(128, 2048)
    rollout(seen, cost, seed, last)
    verify_tokens, _ = seen.in_tokens(last)
    assert verify_tokens == pytest.approx(latency(cost, last, 0) / cost[2] - last, rel=0.5)


def test_a_request_is_not_a_token():
    seen = StepCost(128, 2048)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        requests, per_request = int(rng.integers(1, 128)), int(rng.integers(0, 6))
        drafted = requests * per_request
        seen.observe(requests, drafted, latency((2e-3, 0.4e-3, 0.04e-3, 0), requests, drafted))
    seen.observe(64, 0, 2e-3 + 0.4e-3 * 64)
    assert seen.in_tokens(64)[0] == pytest.approx((2 + 0.4 * 64) / 0.04 - 64, rel=0.3)


def test_tells_what_verifying_anything_costs():
    seen = StepCost(128, 2048)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        drafted = int(rng.integers(0, 60)) * (rng.random() < 0.7)
        seen.observe(16, drafted, latency((5e-3, 0, 5e-5, 2e-3), 16, drafted))
    assert seen.in_tokens(16)[1] == pytest.approx(40, rel=0.4)


@pytest.mark.parametrize(("running", "per_token"), [(8, 4e-4), (100, 5e-5)])
def test_tells_what_a_token_costs_now_where_latency_is_a_curve(running, per_token):
    rng = np.random.default_rng(0)
    seen = StepCost(128, 2048)
    for requests in (100, 50, 8, running):
        for _ in range(300):
            drafted = int(requests * 4 * rng.random())
            tokens = requests + drafted
            seconds = 5e-3 + 4e-4 * min(tokens, 100) + 5e-5 * max(0, tokens - 100)
            seen.observe(requests, drafted, seconds * rng.lognormal(0, 0.1))
    plain = 5e-3 + 4e-4 * min(running, 100)
    assert seen.in_tokens(running)[0] == pytest.approx(plain / per_token - running, rel=0.5)


def test_follows_when_the_cost_changes():
    seen = StepCost(128, 2048)
    for cost in (GPU, GPU, CPU, CPU):
        rollout(seen, cost, last=16)
    assert seen.in_tokens(16)[0] == pytest.approx(latency(CPU, 16, 0) / CPU[2] - 16, rel=0.5)


def test_knows_nothing_before_drafts_differ():
    seen = StepCost(128, 2048)
    for _ in range(100):
        seen.observe(64, 0, 0.01)
    assert all(math.isnan(v) for v in seen.in_tokens(64))


def test_larger_steps_do_not_count():
    seen, other = StepCost(128, 500), StepCost(128, 500)
    rollout(seen, CPU)
    rollout(other, CPU)
    for _ in range(100):
        other.observe(129, 0, 1.0)
        other.observe(8, 501, 1.0)
    assert seen.in_tokens(8) == other.in_tokens(8)


@given(
    st.lists(
        st.tuples(st.integers(-5, 200), st.integers(-5, 3000), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=200,
    ),
    st.integers(1, 128),
)
def test_any_input_gives_a_cost_that_can_be_used_or_none(steps, requests):
    seen = StepCost(128, 2048)
    for step in steps:
        seen.observe(*step)
    verify_tokens, jump = seen.in_tokens(requests)
    assert math.isnan(verify_tokens) or (0 <= verify_tokens < 1024 + 128 and 0 <= jump < math.inf)
