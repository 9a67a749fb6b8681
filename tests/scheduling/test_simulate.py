"""The simulated rollout, against arithmetic and a slow reference, and what the policies gain in it."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from das_verl.scheduling import simulate
from das_verl.scheduling.simulate import Acceptance, Cost, Workload


def workload_of(lengths: list[int]) -> Workload:
    n = len(lengths)
    return Workload(np.array(lengths), np.arange(n), np.tile(np.array(lengths)[:, None], 4), max(lengths))


def slow_reference(lengths: list[int], starts: np.ndarray, acceptance: Acceptance, drafts: int, cost: Cost) -> float:
    seconds, done, at = 0.0, [0] * len(lengths), starts.tolist()
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        tokens = 0
        for i, length in enumerate(lengths):
            if done[i] == length:
                continue
            on_offer = np.flatnonzero(acceptance.chances[at[i]] > 0).size
            asked = min(drafts, length - done[i] - 1, on_offer)
            gained = 1 + min(int(acceptance.accepted[at[i]]), asked)
            tokens += 1 + asked
            done[i] += gained
            at[i] = (at[i] + gained) % len(acceptance.accepted)
        seconds += cost.base + cost.per_token * tokens
    return seconds


def test_without_drafts_the_time_is_that_of_the_longest_and_of_all_tokens():
    workload, cost = simulate.log_normal(0, 300, 0.9, prompts=8, each=4, end=2000), Cost(3e-3, 1e-4)
    (all_of_them,) = simulate.as_verl(workload, 1)
    got = simulate.rollout_time(workload, simulate.drawn((0.5,)), simulate.fixed(0), [all_of_them], cost)
    assert got == pytest.approx(3e-3 * workload.lengths.max() + 1e-4 * workload.lengths.sum())


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(0, 5),
)
def test_equals_a_slow_reference(lengths, rows, drafts):
    # What is on offer in each row, and how much of that is accepted.
    chances = np.array([[0.5] * n + [0.0] * (4 - n) for n, _ in rows], np.float32)
    acceptance = Acceptance(chances, np.array([min(n, a) for n, a in rows]))
    workload, cost = workload_of(lengths), Cost(2.0, 0.25)
    placed = [np.arange(len(lengths))]
    got = simulate.rollout_time(workload, acceptance, simulate.fixed(drafts), placed, cost, seed=3)
    starts = np.random.default_rng(3).integers(0, len(rows), len(lengths))
    assert got == pytest.approx(slow_reference(lengths, starts, acceptance, drafts, cost))


def test_placements_hold_every_request_once():
    workload = simulate.log_normal(0, 300, 0.9, prompts=8, each=4)
    for placed in (simulate.as_verl(workload, 3), simulate.by_length(workload.lengths, 3)):
        assert sorted(np.concatenate(placed).tolist()) == list(range(32))


def test_where_a_draft_costs_as_much_as_a_step_nothing_is_drafted():
    workload = simulate.log_normal(0, 300, 0.9, prompts=8, each=4)
    times = simulate.compare(workload, simulate.drawn((0.5, 0.2)), ranks=2, cost=Cost(1e-9, 1e-3))
    assert times["solved"] == pytest.approx(times["none, longest first"], rel=1e-3)


@pytest.mark.parametrize(("curve", "most"), [("shared", 0.62), ("reasoning", 0.52)])
@pytest.mark.parametrize("kind", simulate.WORKLOADS)
def test_prices_beat_every_fixed_number_of_drafts(curve, most, kind):
    workload = simulate.log_normal(5, *simulate.WORKLOADS[kind])
    times = simulate.compare(workload, simulate.drawn(simulate.CURVES[curve]))
    fixed = min(t for name, t in times.items() if name[0].isdigit())
    assert times["solved"] <= 0.94 * fixed
    assert times["solved"] < min(times["10 drafts"], times["classes"], times["solved, equal weights"])
    assert times["lengths known"] < times["solved"]
    if kind == "4,000":
        assert times["solved"] <= most


def test_the_command_prints_every_policy_on_every_workload(monkeypatch, capsys):
    monkeypatch.setattr(simulate, "log_normal", functools.partial(simulate.log_normal, prompts=16))
    simulate.main(seeds=1, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["acceptance"] for row in rows] == ["shared"] * 3 + ["reasoning"] * 3
    assert all(row["solved"] < row["none"] == 1.0 for row in rows)
    simulate.main(seeds=1, ranks=2)
    assert "lengths known" in capsys.readouterr().out


def test_a_cost_that_cannot_be_is_refused():
    with pytest.raises(typer.BadParameter, match="a token must take some"):
        simulate.main(token_us=0)
