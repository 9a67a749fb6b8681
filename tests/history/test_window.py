import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from das_verl.history import TrajectoryWindow, prompt_key

trajectories = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6)), max_size=40)


@settings(derandomize=True, deadline=None)
@given(trajectories, st.integers(1, 4), st.integers(1, 30))
def test_window_and_cap_keep_what_a_plain_list_would(added, window, max_tokens):
    history = TrajectoryWindow(window, max_bytes=4 * max_tokens)
    kept: list[tuple[str, list[int]]] = []
    for key, tokens in added:
        history.add(key, tokens)
        if 0 < len(tokens) <= max_tokens:
            kept.append((key, tokens))
            of_key = [i for i, (k, _) in enumerate(kept) if k == key]
            if len(of_key) > window:
                del kept[of_key[0]]
            while sum(len(t) for _, t in kept) > max_tokens:
                del kept[0]
        assert len(history) == len(kept)
        assert history.nbytes == 4 * sum(len(t) for _, t in kept)
        for name in "abc":
            expected = [t for k, t in kept if k == name]
            got = history.get([name])
            assert [t.tolist() for t in got.get(name, [])] == expected
            assert (name in got) == bool(expected)


def test_tokens_are_kept_as_int32():
    history = TrajectoryWindow(1, max_bytes=100)
    history.add("a", [0, 2**31 - 1])
    assert history.get(["a"])["a"][0].dtype == np.int32


def test_a_later_change_of_the_callers_array_changes_nothing():
    history = TrajectoryWindow(1, max_bytes=100)
    tokens = np.array([1, 2], dtype=np.int32)
    history.add("a", tokens)
    tokens[0] = 9
    assert history.get(["a"])["a"][0].tolist() == [1, 2]


def test_key_depends_on_token_ids_alone():
    assert prompt_key([1, 2]) == prompt_key(np.array([1, 2], dtype=np.int64))
    assert prompt_key([1, 2]) != prompt_key([2, 1])
    assert prompt_key([12]) != prompt_key([1, 2])
    assert prompt_key([0]) != prompt_key([0, 0]) != prompt_key([])
