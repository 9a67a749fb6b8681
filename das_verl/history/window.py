"""The sliding window of recent trajectories that trees are built from (DAS, arXiv 2511.13841)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

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


class TrajectoryWindow:
    """The last ``window`` trajectories of every prompt, under a cap in bytes.

    Parameters
    ----------
    window : int
        Trajectories kept per prompt. The paper recommends 16 to 32.
    max_bytes : int
        Cap on the token bytes kept. Over it, the trajectories added longest ago go first.
    """

    def __init__(self, window: int, max_bytes: int) -> None:
        self.window = window
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.evicted = 0
        self._by_key: dict[str, deque[int]] = {}
        self._trajectories: OrderedDict[int, tuple[str, np.ndarray]] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._trajectories)

    def add(self, key: str, tokens: Sequence[int] | np.ndarray) -> None:
        """Remember one finished trajectory of prompt ``key`` (token ids, converted to int32)."""
        tokens = np.array(tokens, dtype=np.int32)
        if tokens.nbytes == 0 or tokens.nbytes > self.max_bytes:
            return
        of_key = self._by_key.setdefault(key, deque())
        of_key.append(self._next)
        self._trajectories[self._next] = (key, tokens)
        self._next += 1
        self.nbytes += tokens.nbytes
        if len(of_key) > self.window:
            self._drop(of_key[0])
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._trajectories)))
            self.evicted += 1

    def get(self, keys: Iterable[str]) -> dict[str, list[np.ndarray]]:
        """Return the trajectories of those ``keys`` that have any, oldest first."""
        return {k: [self._trajectories[i][1] for i in self._by_key[k]] for k in keys if k in self._by_key}

    def _drop(self, i: int) -> None:
        key, tokens = self._trajectories.pop(i)
        self.nbytes -= tokens.nbytes
        of_key = self._by_key[key]
        of_key.popleft()
        if not of_key:
            del self._by_key[key]
