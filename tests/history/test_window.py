import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from das_verl.history import Trajectory, TrajectoryWindow, prompt_key

trajectories = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6)), max_size=40)


def response(tokens) -> Trajectory:
    return Trajectory.of([], tokens)


@given(trajectories, st.integers(1, 4), st.integers(1, 30))
def test_window_and_cap_keep_what_a_plain_list_would(added, window, max_tokens):
    overhead = response([1]).nbytes - 4
    history = TrajectoryWindow(window, max_bytes=4 * max_tokens + overhead)
    kept: list[tuple[str, Trajectory]] = []
    for key, tokens in added:
        trajectory = response(tokens)
        history.add(key, trajectory)
        if tokens and trajectory.nbytes <= history.max_bytes:
            kept.append((key, trajectory))
            of_key = [i for i, (k, _) in enumerate(kept) if k == key]
            if len(of_key) > window:
                del kept[of_key[0]]
            while sum(t.nbytes for _, t in kept) > history.max_bytes:
                del kept[0]
        assert list(history) == kept
        assert len(history) == len(kept)
        assert history.nbytes == sum(t.nbytes for _, t in kept)
        for name in "abc":
            expected = [t for k, t in kept if k == name]
            got = history.get([name])
            assert got.get(name, []) == expected
            assert (name in got) == (name in history) == bool(expected)
            lengths = [len(t.tokens) for t in expected or [t for _, t in kept]]
            assert history.mean_length(name) == sum(lengths) / max(1, len(lengths))


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12),
    st.integers(0, 4),
)
def test_only_what_the_model_generated_can_be_drafted(prompt, marked, context):
    tokens, mask = [t for t, _ in marked], [int(m) for _, m in marked]
    trajectory = Trajectory.of(prompt, tokens, mask, prompt_tail=context)
    whole, position = prompt + tokens, len(prompt)
    expected = []
    while position < len(whole):
        end = position
        while end < len(whole) and mask[end - len(prompt)]:
            end += 1
        if end > position:
            expected.append(whole[max(0, position - context) : end])
        position = max(end, position + 1)
    assert [s.tolist() for s in trajectory.sequences(context)] == expected
    assert trajectory.length == sum(mask)


def test_tokens_are_kept_as_int32_copies():
    tokens = np.array([0, 2**31 - 1])
    trajectory = response(tokens)
    tokens[0] = 9
    assert (trajectory.tokens.dtype, trajectory.tokens.tolist()) == (np.int32, [0, 2**31 - 1])


def test_the_cap_holds_under_a_flood():
    history = TrajectoryWindow(16, max_bytes=2_000_000)
    for sample in range(16):
        for prompt in range(100):
            history.add(str(prompt), response(np.full(4000, sample)))
            assert history.nbytes <= 2_000_000
    assert len(history) == 2_000_000 // response(np.zeros(4000)).nbytes
    assert {int(t.tokens[0]) for _, t in history} == {14, 15}
    assert history.evicted > 0


def test_key_depends_on_token_ids_alone():
    assert prompt_key([1, 2]) == prompt_key(np.array([1, 2], dtype=np.int64))
    assert prompt_key([1, 2]) != prompt_key([2, 1])
    assert prompt_key([12]) != prompt_key([1, 2])
    assert prompt_key([0]) != prompt_key([0, 0]) != prompt_key([])
