"""Which prompts' predictions hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from das_verl.scheduling import Trust


def share(trust: Trust, key: str) -> float:
    return float(trust.shares(np.array([trust.row(key)]))[0])


def observe(trust: Trust, key: str, accepted: float, expected: float, times: int = 1) -> None:
    for _ in range(times):
        trust.observe(np.array([trust.row(key)]), np.array([accepted]), np.array([expected]))


def test_all_is_trusted_at_first():
    assert share(Trust(), "new") == 1.0


def test_a_prompt_whose_drafts_fail_is_not_trusted_and_others_are():
    trust = Trust()
    for _ in range(100):
        observe(trust, "moved away", 0, 2)
        observe(trust, "as before", 2, 2)
    assert share(trust, "moved away") < 0.05
    assert share(trust, "as before") > 0.9


def test_where_all_fail_a_new_prompt_is_not_trusted_either():
    trust = Trust()
    observe(trust, "a", 0.5, 2, times=500)
    assert 0.2 < share(trust, "b") < 0.35


def test_trust_comes_back_with_time_and_with_another_tree():
    trust = Trust()
    observe(trust, "a", 0, 2, times=20)
    lost = share(trust, "a")
    for _ in range(200):
        trust.fade()
    assert share(trust, "a") > 0.8 > lost
    observe(trust, "a", 0, 2, times=20)
    trust.forget(["a", "never seen"])
    assert share(trust, "a") > 2 * lost


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("observe"), st.sampled_from("abc"), st.floats(0, 16), st.floats(0, 1)),
            st.tuples(st.just("forget"), st.one_of(st.none(), st.sampled_from("abc"))),
            st.tuples(st.just("fade")),
        ),
        max_size=40,
    )
)
def test_a_prompts_row_is_its_own_and_shares_stay_in_bounds(operations):
    trust = Trust()
    for name, *args in operations:
        if name == "observe":
            key, expected, rate = args
            observe(trust, key, expected * rate, expected)
        elif name == "forget":
            trust.forget(None if args[0] is None else [args[0]])
        else:
            trust.fade()
        assert all(0.001 <= share(trust, key) <= 1.5 for key in "abc")
        assert len({trust.row(key) for key in "abc"}) == 3


def test_many_prompts_find_room():
    trust = Trust()
    assert [trust.row(i) for i in range(200)] == list(range(200))
    trust.forget(range(100))
    assert sorted(trust.row(i) for i in range(300, 400)) == list(range(100))
