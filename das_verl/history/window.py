"""The sliding window of recent trajectories that trees are built from (DAS, arXiv 2511.13841)."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


def prompt_key(prompt_ids: Sequence[int] | np.ndarray) -> str:
    """Return the key under which rollouts of a prompt are remembered.

    Parameters
    ----------
    prompt_ids : sequence of int
        Token ids of the prompt. Text never enters: equal text with other token ids is another prompt.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    ids = np.ascontiguousarray(prompt_ids, dtype=np.int32)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()


def text_hash(text: str) -> str:
    """Name a prompt by its text, special tokens left out: all that verl's rollout dumps tell of it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Trajectory:
    """A finished rollout of a prompt.

    Attributes
    ----------
    tokens : ndarray of int32, shape (n,)
        End of the prompt, and all that follows it: the model's tokens, and those of tools and later turns.
    generated : ndarray of int32, shape (k, 2)
        Start and end in ``tokens`` of each stretch that the model generated.
    step : int
        Training step that the prompt was drawn for.
    version : int
        Version of the policy that finished it, -1 if unknown.
    reward : float
        NaN if unknown.
    """

    tokens: np.ndarray
    generated: np.ndarray
    step: int = -1
    version: int = -1
    reward: float = math.nan

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        response_mask: Sequence[int] | None = None,
        *,
        prompt_tail: int = 0,
        step: int = -1,
        version: int = -1,
        reward: float | None = None,
    ) -> Trajectory:
        """Take a trajectory from verl's fields; ``response_mask`` is 1 where the model generated, all 1 by default."""
        tail = prompt_ids[max(0, len(prompt_ids) - prompt_tail) :]
        tokens = np.concatenate([np.asarray(tail, np.int32), np.asarray(response_ids, np.int32)])
        mask = np.zeros(len(tokens) + 2, np.int8)
        mask[len(tail) + 1 : -1] = 1 if response_mask is None else np.asarray(response_mask) != 0
        generated = np.flatnonzero(np.diff(mask)).astype(np.int32).reshape(-1, 2)
        return cls(tokens, generated, step, version, math.nan if reward is None else float(reward))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.tokens.nbytes + self.generated.nbytes

    @property
    def length(self) -> int:
        """Tokens that the model generated."""
        return int(np.diff(self.generated).sum())

    def sequences(self, context: int) -> Iterator[np.ndarray]:
        """Yield what a tree indexes: each stretch that the model generated, with ``context`` tokens before it.

        So a draft can start from what a tool said, and never goes on into it.
        """
        for start, end in self.generated.tolist():
            yield self.tokens[max(0, start - context) : end]


class TrajectoryWindow:
    """The last ``window`` trajectories of every prompt, under a cap in bytes.

    Parameters
    ----------
    window : int
        Trajectories kept per prompt. The paper recommends 16 to 32.
    max_bytes : int
        Cap on the bytes kept. Over it, the trajectories added longest ago go first.
    """

    def __init__(self, window: int, max_bytes: int) -> None:
        self.window = window
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.evicted = 0
        self._length = 0  # tokens that the model generated, in all
        self._by_key: dict[str, deque[int]] = {}
        self._trajectories: OrderedDict[int, tuple[str, Trajectory]] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._trajectories)

    def __iter__(self) -> Iterator[tuple[str, Trajectory]]:
        """Iterate over (key, trajectory) in the order of their addition."""
        return iter(self._trajectories.values())

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    @property
    def num_keys(self) -> int:
        """Prompts that have a trajectory."""
        return len(self._by_key)

    def add(self, key: str, trajectory: Trajectory) -> None:
        """Remember one finished trajectory of prompt ``key``; one without generated tokens is left out."""
        if not len(trajectory.generated) or trajectory.nbytes > self.max_bytes:
            return
        of_key = self._by_key.setdefault(key, deque())
        of_key.append(self._next)
        self._trajectories[self._next] = (key, trajectory)
        self._next += 1
        self.nbytes += trajectory.nbytes
        self._length += trajectory.length
        if len(of_key) > self.window:
            self._drop(of_key[0])
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._trajectories)))
            self.evicted += 1

    def get(self, keys: Iterable[str]) -> dict[str, list[Trajectory]]:
        """Return the trajectories of those ``keys`` that have any, oldest first."""
        return {k: [self._trajectories[i][1] for i in self._by_key[k]] for k in keys if k in self._by_key}

    def mean_length(self, key: str | None) -> float:
        """Return how many tokens the model generated for a prompt, on average; for one without history, for all.

        0 if there is no history at all.
        """
        if key not in self._by_key:
            return self._length / max(1, len(self))
        lengths = [self._trajectories[i][1].length for i in self._by_key[key]]
        return sum(lengths) / len(lengths)

    def _drop(self, i: int) -> None:
        key, trajectory = self._trajectories.pop(i)
        self.nbytes -= trajectory.nbytes
        self._length -= trajectory.length
        of_key = self._by_key[key]
        of_key.popleft()
        if not of_key:
            del self._by_key[key]
