"""A window of trajectories as a file: plain arrays, never pickle."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from das_verl.history.window import Trajectory, TrajectoryWindow

_FORMAT = "das-verl history 1"


class SnapshotError(ValueError):
    """A file that is not a snapshot of this version, in one line."""


def dump(window: TrajectoryWindow, names: Mapping[str, str]) -> bytes:
    """Return a snapshot of ``window`` and of ``names``, other names that its keys go by.

    The format is an uncompressed ``.npz`` of these arrays, trajectories in the order of their addition:

    ``format``, ``keys`` and ``names`` (text), ``name_of`` (index into ``keys``); ``key_of``, ``step``, ``version``,
    ``reward``, ``length``, ``stretches`` of each trajectory; ``tokens`` and ``generated``, concatenated.
    """
    trajectories = [trajectory for _, trajectory in window]
    index = {key: i for i, key in enumerate(dict.fromkeys(key for key, _ in window))}
    known = {name: index[key] for name, key in names.items() if key in index}
    file = io.BytesIO()
    np.savez(
        file,
        format=np.array(_FORMAT),
        keys=np.array(list(index), dtype=np.str_),
        names=np.array(list(known), dtype=np.str_),
        name_of=np.array(list(known.values()), np.int64),
        key_of=np.array([index[key] for key, _ in window], np.int64),
        step=np.array([t.step for t in trajectories], np.int64),
        version=np.array([t.version for t in trajectories], np.int64),
        reward=np.array([t.reward for t in trajectories], np.float64),
        length=np.array([len(t.tokens) for t in trajectories], np.int64),
        stretches=np.array([len(t.generated) for t in trajectories], np.int64),
        tokens=np.concatenate([t.tokens for t in trajectories] or [np.empty(0, np.int32)]),
        generated=np.concatenate([t.generated for t in trajectories] or [np.empty((0, 2), np.int32)]),
    )
    return file.getvalue()


def load(data: bytes, window: TrajectoryWindow) -> dict[str, str]:
    """Add the trajectories of a snapshot to ``window``; return the keys' other names.

    Raises
    ------
    SnapshotError
        If the bytes are not a whole snapshot of this format; ``window`` is as before then.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            if str(file["format"]) != _FORMAT:
                raise SnapshotError(f"its format is {str(file['format'])!r}, this version reads {_FORMAT!r}")
            a = {name: file[name] for name in file.files}
        keys, names = a["keys"].tolist(), a["names"].tolist()
        tokens = a["tokens"].astype(np.int32, casting="safe")
        generated = a["generated"].astype(np.int32, casting="safe").reshape(-1, 2)
        ends, stretch_ends = np.cumsum(a["length"]), np.cumsum(a["stretches"])
        rows = list(
            zip(
                *(a[name].tolist() for name in ("key_of", "step", "version", "reward", "length", "stretches")),
                strict=True,
            )
        )
        if ends[-1:].sum() != len(tokens) or stretch_ends[-1:].sum() != len(generated):
            raise SnapshotError("its lengths do not add up")
        if tokens.min(initial=0) < 0 or (rows and min(a["length"].min(), a["stretches"].min()) < 0):
            raise SnapshotError("it holds negative token ids or lengths")
        indices = np.concatenate([a["key_of"], a["name_of"]])
        if a["keys"].dtype.kind != "U" or a["names"].dtype.kind != "U":
            raise SnapshotError("its keys are not text")
        if indices.min(initial=0) < 0 or indices.max(initial=-1) >= len(keys):
            raise SnapshotError("it refers to keys that it does not hold")
        other_names = dict(zip(names, (keys[i] for i in a["name_of"].tolist()), strict=True))
        read = []
        for (key_of, step, version, reward, length, stretches), end, stretch_end in zip(
            rows, ends.tolist(), stretch_ends.tolist(), strict=True
        ):
            spans = generated[stretch_end - stretches : stretch_end]
            flat = spans.reshape(-1)
            if (np.diff(flat) < 0).any() or flat.min(initial=0) < 0 or flat.max(initial=0) > length:
                raise SnapshotError("a trajectory's stretches lie outside of it")
            # Copies: a view would keep the whole snapshot in memory.
            trajectory = Trajectory(tokens[end - length : end].copy(), spans.copy(), step, version, reward)
            read.append((keys[key_of], trajectory))
    except SnapshotError:
        raise
    except Exception as error:  # the readers of zip files and arrays raise nearly anything on damaged input
        raise SnapshotError(f"it is damaged or something else ({type(error).__name__})") from None
    for key, trajectory in read:
        window.add(key, trajectory)
    return other_names


def write(path: Path, data: bytes) -> None:
    """Write a snapshot so that ``path`` holds all of it or what it held before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
