"""The calls that reach the drafter inside a vLLM worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from das_verl.vllm.proposer import Proposer


def pack_history(history: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Any]:
    """Lay out trajectories by key in plain types that every RPC layer carries: str, int, bytes.

    Parameters
    ----------
    history : mapping of str to sequence of int32 arrays
        Trajectories of each prompt key, oldest first.
    """
    trajectories = [t for ts in history.values() for t in ts]
    return {
        "keys": list(history),
        "counts": [len(ts) for ts in history.values()],
        "lengths": [len(t) for t in trajectories],
        "tokens": b"".join(np.ascontiguousarray(t, dtype=np.int32).tobytes() for t in trajectories),
    }


def unpack_history(packed: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
    """Undo :func:`pack_history`."""
    tokens = np.frombuffer(packed["tokens"], dtype=np.int32)
    trajectories = iter(np.split(tokens, np.cumsum(packed["lengths"])[:-1]) if packed["lengths"] else [])
    return {k: [next(trajectories) for _ in range(n)] for k, n in zip(packed["keys"], packed["counts"], strict=True)}


class DrafterExtension:
    """vLLM worker extension (``worker_extension_cls``) whose methods answer ``collective_rpc``.

    Every name starts with ``das_``: vLLM refuses an extension that shadows a method of its worker.
    """

    model_runner: Any
    device: Any

    def das_attach(self) -> None:
        """Hand the model runner to the drafter, which cannot draft before; call it once the engine is up."""
        from vllm.distributed import get_tensor_model_parallel_rank

        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, Proposer):
            raise RuntimeError(f"this model runner drafts with {type(drafter).__name__}, not with das-verl's proposer")
        drafter.attach(self.model_runner, get_tensor_model_parallel_rank())

    def das_update(self, packed: dict[str, Any], released: list[str] | None) -> None:
        """Call :meth:`Proposer.update` with :func:`pack_history`'s layout; returns at once."""
        self.model_runner.drafter.update(unpack_history(packed), released)

    def das_counts(self) -> dict[str, Any]:
        """Return what the drafter counted since the last call."""
        return self.model_runner.drafter.counts()
