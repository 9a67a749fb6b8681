import io
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das_verl.history import SnapshotError, Trajectory, TrajectoryWindow, snapshot

rollouts = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), max_size=6),
        st.integers(-1, 9),
        st.one_of(st.none(), st.floats(-1, 1)),
    ),
    max_size=12,
)


def filled(added=(("a", [(5, 1), (6, 0), (7, 1)], 3, 0.5), ("b", [(1, 1)], 4, None))) -> TrajectoryWindow:
    window = TrajectoryWindow(2, max_bytes=200)
    for key, marked, step, reward in added:
        window.add(key, Trajectory.of([], [t for t, _ in marked], [m for _, m in marked], step=step, reward=reward))
    return window


def contents(window: TrajectoryWindow) -> list:
    return [
        (key, t.tokens.tolist(), t.generated.tolist(), t.step, t.version, repr(t.reward), t.tokens.dtype)
        for key, t in window
    ]


@given(rollouts)
def test_what_is_read_is_what_was_written(added):
    window = filled(added)
    again = TrajectoryWindow(window.window, window.max_bytes)
    names = {"first": "a", "other": "a", "second": "b", "lost": "nowhere"}
    read = snapshot.load(snapshot.dump(window, names), again)
    assert contents(again) == contents(window)
    assert again.nbytes == window.nbytes
    assert read == {name: key for name, key in names.items() if key in window}


def test_a_smaller_window_keeps_the_newest():
    window = filled([("a", [(n, 1)], n, 0.0) for n in range(2)])
    again = TrajectoryWindow(1, max_bytes=200)
    snapshot.load(snapshot.dump(window, {}), again)
    assert [t.step for _, t in again] == [1]


def arrays(**changes) -> bytes:
    with np.load(io.BytesIO(snapshot.dump(filled(), {"x": "a"}))) as file:
        content = dict(file) | changes
    data = io.BytesIO()
    np.savez(data, **{name: value for name, value in content.items() if value is not None})
    return data.getvalue()


GOOD = snapshot.dump(filled(), {})


def flipped(at: int) -> bytes:
    return GOOD[:at] + bytes([GOOD[at] ^ 1]) + GOOD[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        os.urandom(1000),
        GOOD[: len(GOOD) // 2],
        GOOD[:-1],
        flipped(GOOD.index(np.array([5, 6, 7], np.int32).tobytes())),
        np.array([1]).tobytes(),
        arrays(format=np.array("das-verl history 99")),
        arrays(format=None),
        arrays(tokens=np.array([1, 2], np.int32)),
        arrays(tokens=np.array([-1, 6, 7, 1], np.int32)),
        arrays(tokens=np.array([0.5, 6, 7, 1])),
        arrays(length=np.array([-1, 5])),
        arrays(generated=np.array([[0, 9], [2, 3], [0, 1]], np.int32)),
        arrays(key_of=np.array([0, 9])),
        arrays(step=np.array([1])),
        arrays(keys=np.array([{"a": 1}], dtype=object)),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_in_one_line(data):
    window = filled()
    before = contents(window)
    with pytest.raises(SnapshotError) as error:
        snapshot.load(data, window)
    assert "\n" not in str(error.value)
    assert contents(window) == before


def test_any_flipped_byte_is_found_or_harmless():
    # The zip container's own fields may hold slack; what is read must be right in any case.
    for at in range(len(GOOD)):
        window = TrajectoryWindow(2, max_bytes=200)
        try:
            snapshot.load(flipped(at), window)
        except SnapshotError:
            continue
        assert contents(window) == contents(filled())


def test_writing_replaces_the_whole_file_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "history.npz"
    snapshot.write(path, b"old")

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        snapshot.write(path, b"new")
    assert [p.read_bytes() for p in path.parent.iterdir()] == [b"old"]


def test_a_snapshot_holds_no_pickle():
    with zipfile.ZipFile(io.BytesIO(snapshot.dump(filled(), {"x": "a"}))) as file:
        for name in file.namelist():
            np.lib.format.read_array(io.BytesIO(file.read(name)), allow_pickle=False)
