"""The trees of one step: built in the background, used in batches, released together."""

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from das_verl.drafter import _kernels as k
from das_verl.drafter._rows import Rows
from das_verl.drafter.tree import Block, as_tokens, warm_up

_log = logging.getLogger(__name__)
_FIRST_UNITS = 1024
_LEARNING_RATE = 0.002
_LIVE_WEIGHT = 2  # an occurrence in a sibling or in the request itself counts as much as two old ones
_HISTORY_SHARE = 0.75  # of the byte cap; the rest is for what the step itself generates
_slot = attrgetter("slot")
_SLACK = 0.5  # room of a new tree for running requests, relative to its history


@dataclass(frozen=True)
class StoreStats:
    """Figures of a store; times and counts add up over its life, sizes are current.

    Attributes
    ----------
    build_s : float
        Seconds spent building trees, summed over the threads.
    tree_bytes, num_trees, num_tokens : int
        Memory in use, trees, and tokens indexed, now.
    dropped_tokens : int
        History tokens left out to stay within the byte cap.
    frozen_trees : int
        Trees that stopped inserting because of the byte cap, now.
    draft_s : float
        Seconds spent in `propose`.
    drafted, accepted : int
        Drafted tokens, and those of them that were verified.
    requests, requests_with_history : int
        Requests opened, and those whose problem had a history.
    """

    build_s: float
    tree_bytes: int
    num_trees: int
    num_tokens: int
    dropped_tokens: int
    frozen_trees: int
    draft_s: float
    drafted: int
    accepted: int
    requests: int
    requests_with_history: int


class Request:
    """A running request of a store. `slot` is its row there, 0 once it is closed."""

    __slots__ = ("key", "slot")

    def __init__(self, key: Hashable, slot: int) -> None:
        self.key = key
        self.slot = slot


@dataclass
class _Step:
    """Trees of one step. Tree 0 stands for "none yet"; builders fill in blocks, the driver addresses."""

    index: dict[Hashable, int] = field(default_factory=dict)
    blocks: list[Block | None] = field(default_factory=lambda: [None])
    addresses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    jobs: deque = field(default_factory=deque)
    threads: list[threading.Thread] = field(default_factory=list)
    histories: int = 0  # trees 1 to this one were built from history
    reserved: int = 0
    build_s: list[float] = field(default_factory=list)
    error: BaseException | None = None


class TreeStore:
    """Suffix trees by problem key.

    One thread drives a store; the trees are built in others. Drafts depend on what was fed and on which trees
    are ready, on nothing else: after `wait`, two stores fed the same calls draft the same bytes.

    What running requests generate counts twice as much as history. Drafts are chosen and cut by a logistic
    model of their acceptance, which starts from constants and learns online.

    Parameters
    ----------
    window : int
        Trajectories of a problem that are indexed, the newest ones.
    max_bytes : int
        Cap on the address space of all trees (memory in use is less). History takes at most three quarters
        of it, the newest trajectory of each problem first, then the second newest, and so on. A tree that
        would outgrow the cap while requests run stops inserting and keeps drafting. Building a tree needs
        16 bytes a token besides, for as long as it takes.
    min_prob : float
        A draft ends before its predicted acceptance falls below this.

    Examples
    --------
    >>> store = TreeStore(window=16)
    >>> store.begin_step({b"problem": [[1, 2, 3, 4, 5]]})
    >>> store.wait()
    True
    >>> request = store.open(b"problem", [2])
    >>> store.advance([request], [3], [1])
    >>> store.propose([request], [2])
    [array([4, 5], dtype=int32)]
    """

    def __init__(self, window: int = 16, max_bytes: int = 4 << 30, min_prob: float = 0.0) -> None:
        if window < 0 or max_bytes < 0 or not 0 <= min_prob <= 1:
            raise ValueError(f"bad window {window}, max_bytes {max_bytes} or min_prob {min_prob}")
        self.window = window
        self.max_bytes = max_bytes
        self.min_prob = float(min_prob)
        warm_up()
        self._step = _Step()
        self._rows = Rows(64)  # row 0 is that of closed requests
        self._models: dict[float, int] = {}  # by temperature
        self._free = list(range(63, 0, -1))
        self._open: dict[int, Request] = {}
        self._waiting: dict[Request, list[NDArray[np.int32]]] = {}
        self._totals: dict[str, Any] = {
            "build_s": 0.0,
            "dropped_tokens": 0,
            "draft_s": 0.0,
            "drafted": 0,
            "accepted": 0,
            "requests": 0,
            "requests_with_history": 0,
        }

    def begin_step(self, history: Mapping[Hashable, Sequence[ArrayLike]], threads: int = 2) -> None:
        """Release the last step and start building this one's trees; returns at once.

        Parameters
        ----------
        history : mapping of key to sequences of token ids, oldest first
        threads : int
            Building threads.

        Raises
        ------
        ValueError
            If a trajectory holds ids outside [0, 2**31 - 1).
        """
        newest = {
            key: [as_tokens(t) for t in list(reversed(trajectories))[: self.window]]
            for key, trajectories in history.items()
        }
        self.end_step()
        step = self._step = _Step()
        units, dropped = _fit(newest, int(self.max_bytes * _HISTORY_SHARE))
        self._totals["dropped_tokens"] += dropped
        total = sum(Block.size(n) for n in units.values())
        slack = min(_SLACK, self.max_bytes * _HISTORY_SHARE / total - 1) if total else 0.0
        for key, n in units.items():
            step.index[key] = len(step.blocks)
            step.blocks.append(None)
            capacity = n + int(n * slack)
            step.reserved += Block.size(capacity)
            step.jobs.append((step.index[key], capacity, newest[key]))
        step.histories = len(units)
        step.addresses = np.zeros(len(step.blocks) + 64, np.int64)
        for _ in range(min(threads, len(step.jobs))):
            thread = threading.Thread(target=_build, args=(step,), name="das-build", daemon=True)
            step.threads.append(thread)
            thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all trees are built; True if they are.

        Raises
        ------
        RuntimeError
            If a build failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._step.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._step.error is not None:
            raise RuntimeError("building a tree failed") from self._step.error
        return not any(thread.is_alive() for thread in self._step.threads)

    def open(self, key: Hashable, prompt_tail: ArrayLike = (), temperature: float = 1.0) -> Request:
        """Start a request; never waits.

        Until its tree is ready the request drafts nothing and its tokens are kept, to be inserted later.
        Requests whose key has no history share a tree that starts empty. Requests of one temperature share
        an acceptance model, which learns from what becomes of their drafts, across steps.

        Raises
        ------
        ValueError
            If `prompt_tail` holds ids outside [0, 2**31 - 1).
        """
        tail = as_tokens(prompt_tail)
        if not self._free:
            size = len(self._rows)
            self._rows.double()
            self._free = list(range(2 * size - 1, size - 1, -1))
        request = Request(key, self._free.pop())
        self._open[request.slot] = request
        model = self._models.setdefault(round(temperature, 2), len(self._models))
        if model == len(self._rows.models):
            self._rows.add_model()
        self._rows.start(request.slot, _LIVE_WEIGHT, model)
        self._totals["requests"] += 1
        self._totals["requests_with_history"] += 0 < self._step.index.get(key, 0) <= self._step.histories
        self._waiting[request] = [tail.copy()]
        self._catch_up()
        return request

    def advance(self, requests: Sequence[Request], tokens: ArrayLike, counts: ArrayLike) -> None:
        """Append verified tokens, and learn what became of the last drafts.

        Parameters
        ----------
        requests : sequence of Request
            Each at most once; closed ones are ignored.
        tokens : array_like of int32, shape (sum of counts,)
        counts : array_like of int, shape (len(requests),)

        Raises
        ------
        ValueError
            If shapes disagree or an id is outside [0, 2**31 - 1); nothing is appended then.
        """
        # The kernel checks int32 itself, in passing.
        flat = _vector(tokens if getattr(tokens, "dtype", None) == np.int32 else as_tokens(tokens))
        bounds = np.zeros(len(requests) + 1, np.int64)
        steps = np.asarray(counts, np.int64)
        np.cumsum(steps, out=bounds[1:])
        if bounds[-1] != flat.size or (steps < 0).any():
            raise ValueError(f"counts must be non-negative and add up to the {flat.size} tokens given")
        self._catch_up()
        self._advance(_slots(requests), flat, bounds)
        if self._waiting:
            for i, request in enumerate(requests):
                if request in self._waiting:
                    self._waiting[request].append(flat[bounds[i] : bounds[i + 1]].copy())

    def propose(
        self, requests: Sequence[Request], budgets: ArrayLike, min_probs: ArrayLike | None = None
    ) -> list[NDArray[np.int32]]:
        """Draft for a batch.

        Parameters
        ----------
        requests : sequence of Request
            Each at most once; closed ones get no draft.
        budgets : array_like of int, shape (len(requests),)
            Most tokens to draft; 0 for none.
        min_probs : array_like of float, shape (len(requests),), optional
            What a drafted token's chance to be accepted must be for each request, in place of `min_prob`: its
            price where verification costs more for some than for others.

        Returns
        -------
        list of ndarray of int32
        """
        limits = _vector(budgets)
        width = max(1, max(limits.tolist(), default=1))
        out = np.empty((len(requests), width), np.int32)
        counts = np.empty(len(requests), np.int32)
        if min_probs is not None:
            min_probs = np.ascontiguousarray(min_probs, np.float64)
        self.propose_into(_slots(requests), limits, out, counts, None, min_probs)
        flat = out.reshape(-1)
        starts = range(0, flat.size, width)
        return [flat[start : start + n] for start, n in zip(starts, counts.tolist(), strict=True)]

    def propose_into(
        self,
        slots: NDArray[np.int32],
        budgets: NDArray[np.int32],
        out_tokens: NDArray[np.int32],
        out_counts: NDArray[np.int32],
        out_probs: NDArray[np.float32] | None = None,
        min_probs: NDArray[np.float64] | None = None,
    ) -> int:
        """Draft for a batch into given arrays and return the number of drafted tokens.

        Parameters
        ----------
        slots : ndarray of int32, shape (n,)
            `Request.slot` of each row.
        budgets : ndarray of int32, shape (n,)
        out_tokens : ndarray of int32, shape (n, at least the largest budget)
        out_counts : ndarray of int32, shape (n,)
        out_probs : ndarray of float32, shape of out_tokens, optional
            Predicted acceptance up to and including each token.
        min_probs : ndarray of float64, shape (n,), optional
            As in `propose`.
        """
        start = time.perf_counter()
        self._catch_up()
        if out_probs is None:
            out_probs = np.empty(out_tokens.shape, np.float32)
        if min_probs is None:
            min_probs = np.full(len(slots), self.min_prob)
        drafted = self._rows.propose(self._step.addresses, slots, budgets, min_probs, out_tokens, out_probs, out_counts)
        self._totals["drafted"] += drafted
        self._totals["draft_s"] += time.perf_counter() - start
        return int(drafted)

    def close(self, request: Request) -> None:
        """End a request; its tokens stay in the tree until the step ends. May be called again."""
        if request.slot:
            self._waiting.pop(request, None)
            self._rows.trees[request.slot] = 0
            self._free.append(request.slot)
            del self._open[request.slot]
            request.slot = 0

    def end_step(self) -> None:
        """Close all requests and release all trees."""
        for request in list(self._open.values()):
            self.close(request)
        self._step.jobs.clear()
        self._totals["build_s"] += sum(self._step.build_s)
        self._step = _Step()

    def stats(self) -> StoreStats:
        """Return the store's figures."""
        blocks = [b for b in self._step.blocks if b is not None]
        totals = dict(self._totals)
        totals["build_s"] += sum(self._step.build_s)
        return StoreStats(
            tree_bytes=sum(b.nbytes for b in blocks),
            num_trees=len(blocks),
            num_tokens=sum(int(b.words[k.TOKENS]) for b in blocks),
            frozen_trees=sum(int(b.words[k.FROZEN]) for b in blocks),
            **totals,
        )

    def _advance(self, slots: NDArray[np.int32], tokens: NDArray[np.int32], bounds: NDArray[np.int64]) -> None:
        done = np.zeros(len(slots), np.int64)
        while True:
            stopped, accepted = self._rows.advance(self._step.addresses, slots, tokens, bounds, done, _LEARNING_RATE)
            self._totals["accepted"] += accepted
            if stopped < 0:
                raise ValueError(f"token ids must be in [0, 2**31 - 1), got {tokens[-1 - stopped]}")
            if stopped == 0:
                return
            left = np.diff(bounds) - done
            wanted: dict[int, int] = {}
            for tree, n in zip(self._rows.trees[slots].tolist(), left.tolist(), strict=True):
                if n:
                    wanted[tree] = wanted.get(tree, 0) + n + 1
            for tree, n in wanted.items():
                self._grow(tree, n)

    def _grow(self, tree: int, units: int) -> None:
        """Make room for `units` more, or freeze the tree where the cap does not allow it."""
        step = self._step
        block = step.blocks[tree]
        assert block is not None
        needed = int(block.words[k.UNITS]) + units
        capacity = int(block.words[k.CAPACITY])
        for target in (max(needed, capacity + capacity // 2), needed):
            # Both copies exist while one is moved into the other.
            if step.reserved + Block.size(target) <= self.max_bytes:
                step.reserved += Block.size(target) - Block.size(capacity)
                step.blocks[tree] = grown = block.grown(target)
                step.addresses[tree] = grown.address
                return
        block.words[k.FROZEN] = 1

    def _catch_up(self) -> None:
        """Attach the requests whose trees have become ready and feed them what they missed."""
        if not self._waiting:
            return
        step = self._step
        for request in list(self._waiting):
            tree = step.index.get(request.key)
            if tree is None:
                if step.reserved + Block.size(_FIRST_UNITS) > self.max_bytes:
                    del self._waiting[request]
                    continue
                tree = step.index[request.key] = len(step.blocks)
                step.reserved += Block.size(_FIRST_UNITS)
                step.blocks.append(Block(_FIRST_UNITS))
                if tree == len(step.addresses):
                    step.addresses = np.concatenate([step.addresses, np.zeros_like(step.addresses)])
            block = step.blocks[tree]
            if block is not None:
                step.addresses[tree] = block.address
                missed = np.concatenate(self._waiting.pop(request))
                self._rows.trees[request.slot] = tree
                self._advance(np.array([request.slot], np.int32), missed, np.array([0, missed.size], np.int64))
                self._rows.rates[request.slot] = k.RATE_START


def _vector(values: ArrayLike) -> NDArray[np.int32]:
    """Contiguous, writable int32: kernels are compiled for nothing else."""
    array = np.ascontiguousarray(values, np.int32)
    return array if array.flags.writeable else array.copy()


def _slots(requests: Sequence[Request]) -> NDArray[np.int32]:
    return np.fromiter(map(_slot, requests), np.int32, len(requests))


def _fit(newest: dict[Hashable, list[NDArray[np.int32]]], max_bytes: int) -> tuple[dict[Hashable, int], int]:
    """Cut `newest` (newest first) down to what fits; return the units of each tree and the tokens dropped."""
    units = dict.fromkeys(newest, 0)
    total = dropped = 0
    for rank in range(max(map(len, newest.values()), default=0)):
        for key, trajectories in newest.items():
            if rank >= len(trajectories):
                continue
            n = units[key] + trajectories[rank].size + 1
            grown = total + Block.size(n) - (Block.size(units[key]) if units[key] else 0)
            if grown > max_bytes:
                dropped += sum(t.size for t in trajectories[rank:])
                del trajectories[rank:]
            else:
                units[key], total = n, grown
    return {key: n for key, n in units.items() if n}, dropped


def _build(step: _Step) -> None:
    """Thread body: build trees until none is left to start."""
    while True:
        try:
            tree, capacity, sequences = step.jobs.popleft()
        except IndexError:
            return
        try:
            start = time.perf_counter()
            block = Block(capacity)
            block.build(sequences, np.ones(len(sequences), np.int32))
            step.blocks[tree] = block
            step.build_s.append(time.perf_counter() - start)
        except Exception as error:
            _log.exception("building a tree failed: its problem gets no drafts in this step")
            step.error = error
