"""What past lengths say about running requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from das_verl.scheduling.lengths import LONG, MEDIUM, SHORT, UNSEEN, Lengths, remaining

lengths = st.lists(st.integers(1, 20_000), min_size=1, max_size=40)


def expect(likely: np.ndarray, done: int, end: int) -> float:
    out = np.empty(1)
    remaining(likely[None], np.array([done]), np.array([end]), out)
    return float(out[0])


def test_a_prompt_is_expected_to_repeat_its_lengths():
    known = Lengths()
    known.add("short", [90, 100, 110] * 5)
    known.add("long", [900, 1000, 1100] * 5)
    assert 95 < expect(known.likely("short"), 0, 10_000) < 115
    assert 950 < expect(known.likely("long"), 0, 10_000) < 1150
    # One never seen lies between, and one that goes on where most have ended is a long one.
    assert 400 < expect(known.likely("new"), 0, 10_000) < 700
    assert expect(known.likely("new"), 300, 10_000) > 600


@given(lengths, st.integers(0, 30_000), st.integers(1, 5000))
def test_what_remains_is_positive_and_within_the_end(past, done, room):
    known = Lengths()
    known.add("p", past)
    for key in ("p", "other"):
        assert 1 <= expect(known.likely(key), done, done + room) <= room


@given(lengths, st.integers(0, 30_000))
def test_what_remains_is_the_mean_of_the_lengths_that_are_still_possible(past, done):
    known = Lengths()
    known.add("p", past)
    likely = known.likely("p")
    still = likely[likely > done]
    if len(still):
        assert np.isclose(expect(likely, done, 10**9), max(1.0, still.mean() - done))


@given(st.lists(st.integers(1, 5000), min_size=3, max_size=200))
def test_classes_are_shares_of_all_responses(all_lengths):
    known = Lengths(medium=0.5, long=0.8)
    known.add("p", all_lengths)
    medium, long = known.thresholds
    assert np.mean(np.array(all_lengths) > medium) <= 0.5
    assert np.mean(np.array(all_lengths) > long) <= 0.2 + 1 / len(all_lengths)
    assert medium <= long


def test_thresholds_move_with_the_lengths_unless_given_in_tokens():
    moving, fixed = Lengths(0.5, 0.8), Lengths(100, 1000)
    for of in (moving, fixed):
        of.add("p", range(1, 101))
    before = moving.thresholds
    for of in (moving, fixed):
        of.add("p", range(5000, 9000))
    assert moving.thresholds > before
    assert fixed.thresholds == (100, 1000)


def test_the_class_changes_with_the_length_so_far():
    known = Lengths(100, 1000)
    for _ in range(30):
        known.add("short", [50, 50, 50, 50, 500])
        known.add("long", [2000])
    initial = np.array([known.initial_class(k) for k in ("short", "short", "short", "long", "new")])
    assert initial.tolist() == [SHORT, SHORT, SHORT, LONG, UNSEEN]
    done = np.array([0, 60, 3000, 0, 0])
    # A short prompt's response that is past the usual end is a medium one; one that is longer than all, a long one.
    assert known.classes(initial, done)[:4].tolist() == [SHORT, MEDIUM, LONG, LONG]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3000)), max_size=60),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4000)), min_size=1, max_size=8),
)
def test_classes_are_the_likeliest_of_what_was_seen(past, running):
    known = Lengths(200, 1000)
    seen: list[tuple[int, int]] = []
    for key, length in past:
        seen.append((known.initial_class(key), length))
        known.add(key, [length])
    initial = np.array([known.initial_class(k) for k, _ in running])
    done = np.array([d for _, d in running])

    def kind(n: int) -> int:
        return LONG if n > 1000 else MEDIUM if n > 200 else SHORT

    for first, d, found in zip(initial, done, known.classes(initial, done), strict=True):
        later = [kind(n) for c, n in seen if c == first and n > d]
        if later:
            assert later.count(found) == max(later.count(c) for c in (SHORT, MEDIUM, LONG))
        else:
            assert found >= (MEDIUM if first == UNSEEN else first)


def test_forgotten_prompts_still_tell_of_all():
    known = Lengths()
    known.add("p", [1000] * 16)
    known.forget(["p", "never seen"])
    assert known.initial_class("p") == UNSEEN
    assert 900 < expect(known.likely("p"), 0, 10_000) < 1200
