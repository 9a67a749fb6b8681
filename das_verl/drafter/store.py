"""The trees of the prompts in work: built in the background, used in batches, released one by one or together."""

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
_INSERTED_AT_ONCE = 2048  # tokens of others' trajectories in one call: about 2 ms in which an engine waits
_SLACK = 0.5  # room of a new tree for running requests, relative to its history


@dataclass(frozen=True)
class StoreStats:
    """Figures of a store; times and counts add up over its life, sizes are current.

    Attributes
    ----------
    build_s : float
        Seconds spent building trees, summed over the threads.
    visible_s : float
        Seconds in which some request ran without drafts because its tree was not built yet.
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
    visible_s: float
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


class _Tree:
    """One problem's tree. Builders set `block`, everything else belongs to the thread that drives the store."""

    __slots__ = ("at", "block", "capacity", "from_history")

    def __init__(self, at: int, capacity: int, from_history: bool) -> None:
        self.at = at  # in the store's arrays; 0 once it is released
        self.block: Block | None = None
        self.capacity = capacity
        self.from_history = from_history


class _Builder:
    """Threads that build trees; they end when there is nothing left to build."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[_Tree, list[NDArray[np.int32]]]] = deque()
        self.threads: list[threading.Thread] = []
        self.error: BaseException | None = None
        self.busy_s = 0.0
        self._working = 0
        self._lock = threading.Lock()

    def start(self, threads: int) -> None:
        """See to it that `threads` threads work as long as there are jobs."""
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        with self._lock:
            more = max(0, min(threads - self._working, len(self.jobs)))
            self._working += more
        for _ in range(more):
            thread = threading.Thread(target=self._run, name="das-build", daemon=True)
            self.threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:  # so that a thread is not counted on once it has found nothing to do
                if not self.jobs:
                    self._working -= 1
                    return
                tree, sequences = self.jobs.popleft()
            if not tree.at:
                continue
            try:
                start = time.perf_counter()
                block = Block(tree.capacity)
                block.build(sequences, np.ones(len(sequences), np.int32))
                tree.block = block
                with self._lock:
                    self.busy_s += time.perf_counter() - start
            except Exception as error:
                _log.exception("building a tree failed: its problem gets no drafts until it is released")
                self.error = error


class TreeStore:
    """Suffix trees by problem key.

    Trees live from `add` to `release`; `begin_step` and `end_step` do so for all of them at once. One thread drives
    a store; the trees are built in others. Drafts depend on what was fed and on which trees
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
        4 bytes a token besides, for as long as it takes.
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
        self._builder = _Builder()
        self._trees: dict[Hashable, _Tree] = {}
        self._tree_at: list[_Tree | None] = [None]  # 0 stands for none
        self._addresses = np.zeros(64, np.int64)
        self._free_trees: list[int] = []
        self._reserved = 0
        self._inserts: list[tuple[_Tree, NDArray[np.int32]]] = []
        self._waits_since: float | None = None
        self._rows = Rows(64)  # row 0 is that of closed requests
        self._models: dict[float, int] = {}  # by temperature
        self._free = list(range(63, 0, -1))
        self._open: dict[int, Request] = {}
        self._waiting: dict[Request, list[NDArray[np.int32]]] = {}
        self._totals: dict[str, Any] = {
            "visible_s": 0.0,
            "dropped_tokens": 0,
            "draft_s": 0.0,
            "drafted": 0,
            "accepted": 0,
            "requests": 0,
            "requests_with_history": 0,
        }

    def begin_step(self, history: Mapping[Hashable, Sequence[ArrayLike]], threads: int = 2) -> None:
        """Release the last step's trees and start building this one's; returns at once.

        Parameters
        ----------
        history : mapping of key to sequences of token ids, oldest first
        threads : int
            Building threads.

        Raises
        ------
        ValueError
            If a trajectory holds ids outside [0, 2**31 - 1); the last step's trees stay then.
        """
        newest = self._newest(history)
        self.end_step()
        self._add(newest, threads)

    def add(self, history: Mapping[Hashable, Sequence[ArrayLike]], threads: int = 2) -> None:
        """Start building trees beside those that there are; returns at once.

        What is given for a problem that has a tree already is inserted into that tree, with the weight of siblings:
        these are trajectories that other replicas have finished meanwhile.

        Parameters and errors as `begin_step`.
        """
        self._add(self._newest(history), threads)

    def release(self, keys: Iterable[Hashable]) -> None:
        """Close the requests of some problems and release their trees; keys without a tree are skipped."""
        keys = set(keys)
        for request in [request for request in self._open.values() if request.key in keys]:
            self.close(request)
        for tree in [self._trees.pop(key) for key in keys if key in self._trees]:
            self._addresses[tree.at] = 0
            self._tree_at[tree.at] = None
            self._free_trees.append(tree.at)
            self._reserved -= Block.size(tree.capacity)
            tree.at = 0
        self._inserts = [(tree, tokens) for tree, tokens in self._inserts if tree.at]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all trees are built; True if they are.

        Raises
        ------
        RuntimeError
            If a build failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._builder.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._builder.error is not None:
            raise RuntimeError("building a tree failed") from self._builder.error
        return not any(thread.is_alive() for thread in self._builder.threads)

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
        model = self._models.setdefault(round(temperature, 2), len(self._models))
        if model == len(self._rows.models):
            self._rows.add_model()
        request = Request(key, self._new_row(_LIVE_WEIGHT, model))
        self._open[request.slot] = request
        self._totals["requests"] += 1
        tree = self._trees.get(key)
        self._totals["requests_with_history"] += tree is not None and tree.from_history
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
        # The kernel checks ids and counts itself, in passing.
        flat = _vector(tokens if getattr(tokens, "dtype", None) == np.int32 else as_tokens(tokens))
        steps = _vector(counts, np.int64)
        if steps.shape != (len(requests),):
            raise ValueError(f"counts must be one for each of {len(requests)} requests, got shape {steps.shape}")
        if self._waiting or self._inserts:
            self._catch_up()
        self._advance(_slots(requests), flat, steps)
        if self._waiting:
            for request, part in zip(requests, np.split(flat, np.cumsum(steps))[:-1], strict=True):
                if request in self._waiting:
                    self._waiting[request].append(part.copy())

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
        if self._waiting or self._inserts:
            self._catch_up()
        if out_probs is None:
            out_probs = np.empty(out_tokens.shape, np.float32)
        if min_probs is None:
            min_probs = np.full(len(slots), self.min_prob)
        drafted = self._rows.propose(self._addresses, slots, budgets, min_probs, out_tokens, out_probs, out_counts)
        self._totals["drafted"] += drafted
        self._totals["draft_s"] += time.perf_counter() - start
        return int(drafted)

    def close(self, request: Request) -> None:
        """End a request; its tokens stay in the tree until that is released. May be called again."""
        if request.slot:
            if self._waiting.pop(request, None) is not None:
                self._time_waiting()
            self._rows.trees[request.slot] = 0
            self._free.append(request.slot)
            del self._open[request.slot]
            request.slot = 0

    def end_step(self) -> None:
        """Close all requests and release all trees."""
        self._builder.error = None
        self.release(list(self._trees))

    def stats(self) -> StoreStats:
        """Return the store's figures."""
        blocks = [tree.block for tree in self._trees.values() if tree.block is not None]
        waited = 0.0 if self._waits_since is None else time.perf_counter() - self._waits_since
        return StoreStats(
            build_s=self._builder.busy_s,
            tree_bytes=sum(b.nbytes for b in blocks),
            num_trees=len(blocks),
            num_tokens=sum(int(b.words[k.TOKENS]) for b in blocks),
            frozen_trees=sum(int(b.words[k.FROZEN]) for b in blocks),
            **(self._totals | {"visible_s": self._totals["visible_s"] + waited}),
        )

    def _advance(self, slots: NDArray[np.int32], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        done = np.zeros(len(slots), np.int64)
        while True:
            stopped, accepted = self._rows.advance(self._addresses, slots, tokens, counts, done, _LEARNING_RATE)
            self._totals["accepted"] += accepted
            if stopped == -1 - tokens.size:
                raise ValueError(f"counts must be non-negative and add up to the {tokens.size} tokens given")
            if stopped < 0:
                raise ValueError(f"token ids must be in [0, 2**31 - 1), got {tokens[-1 - stopped]}")
            if stopped == 0:
                return
            left = counts - done
            wanted: dict[int, int] = {}
            for at, n in zip(self._rows.trees[slots].tolist(), left.tolist(), strict=True):
                if n:
                    wanted[at] = wanted.get(at, 0) + n + 1
            for at, n in wanted.items():
                tree = self._tree_at[at]
                assert tree is not None
                self._grow(tree, n)

    def _grow(self, tree: _Tree, units: int) -> None:
        """Make room for `units` more, or freeze the tree where the cap does not allow it."""
        assert tree.block is not None
        needed = int(tree.block.words[k.UNITS]) + units
        for target in (max(needed, tree.capacity + tree.capacity // 2), needed):
            # Both copies exist while one is moved into the other.
            if self._reserved + Block.size(target) <= self.max_bytes:
                self._reserved += Block.size(target) - Block.size(tree.capacity)
                tree.block, tree.capacity = tree.block.grown(target), target
                self._addresses[tree.at] = tree.block.address
                return
        tree.block.words[k.FROZEN] = 1

    def _newest(self, history: Mapping[Hashable, Sequence[ArrayLike]]) -> dict[Hashable, list[NDArray[np.int32]]]:
        return {
            key: [as_tokens(t) for t in list(reversed(trajectories))[: self.window]]
            for key, trajectories in history.items()
        }

    def _add(self, newest: dict[Hashable, list[NDArray[np.int32]]], threads: int) -> None:
        for key in [key for key in newest if key in self._trees]:
            self._inserts += [(self._trees[key], tokens.copy()) for tokens in reversed(newest.pop(key))]
        room = max(0, int(self.max_bytes * _HISTORY_SHARE) - self._reserved)
        units, dropped = _fit(newest, room)
        self._totals["dropped_tokens"] += dropped
        total = sum(Block.size(n) for n in units.values())
        slack = min(_SLACK, room / total - 1) if total else 0.0
        for key, n in units.items():
            self._builder.jobs.append((self._new_tree(key, n + int(n * slack), True), newest[key]))
        self._builder.start(threads)

    def _new_tree(self, key: Hashable, capacity: int, from_history: bool) -> _Tree:
        if not self._free_trees:
            self._free_trees.append(len(self._tree_at))
            self._tree_at.append(None)
            if len(self._tree_at) > len(self._addresses):
                self._addresses = np.concatenate([self._addresses, np.zeros_like(self._addresses)])
        tree = _Tree(self._free_trees.pop(), capacity, from_history)
        self._tree_at[tree.at] = self._trees[key] = tree
        self._reserved += Block.size(capacity)
        return tree

    def _catch_up(self) -> None:
        """Attach the requests whose trees have become ready and feed them what they missed."""
        inserts, self._inserts = self._inserts, []
        room = _INSERTED_AT_ONCE
        for tree, tokens in inserts:
            if tree.block is None or room <= 0:
                self._inserts.append((tree, tokens))
                continue
            room -= tokens.size
            self._addresses[tree.at] = tree.block.address
            slot = self._new_row(_LIVE_WEIGHT)
            self._feed(slot, tree, tokens)
            self._rows.trees[slot] = 0
            self._free.append(slot)
        for request in list(self._waiting):
            if request.key not in self._trees:
                if self._reserved + Block.size(_FIRST_UNITS) > self.max_bytes:
                    del self._waiting[request]
                    continue
                self._new_tree(request.key, _FIRST_UNITS, False).block = Block(_FIRST_UNITS)
            tree = self._trees[request.key]
            if tree.block is not None:
                self._addresses[tree.at] = tree.block.address
                self._feed(request.slot, tree, np.concatenate(self._waiting.pop(request)))
                self._rows.rates[request.slot] = k.RATE_START
        self._time_waiting()

    def _time_waiting(self) -> None:
        if self._waiting:
            self._waits_since = self._waits_since or time.perf_counter()
        elif self._waits_since is not None:
            self._totals["visible_s"] += time.perf_counter() - self._waits_since
            self._waits_since = None

    def _feed(self, slot: int, tree: _Tree, tokens: NDArray[np.int32]) -> None:
        self._rows.trees[slot] = tree.at
        self._advance(np.array([slot], np.int32), tokens, np.array([tokens.size], np.int64))

    def _new_row(self, weight: int, model: int = 0) -> int:
        if not self._free:
            size = len(self._rows)
            self._rows.double()
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self._rows.start(slot, weight, model)
        return slot


def _vector(values: ArrayLike, dtype: type = np.int32) -> NDArray[Any]:
    """Contiguous and writable, of one type: kernels are compiled for nothing else."""
    array: NDArray[Any] = np.ascontiguousarray(values, dtype)
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
