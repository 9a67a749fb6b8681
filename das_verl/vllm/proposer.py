"""vLLM's ``custom_class`` proposer: drafts for a whole batch from the trees of its prompts.

vLLM builds one :class:`Proposer` in each worker process and calls :meth:`Proposer.propose` after every engine step.
:class:`das_verl.vllm.worker.DrafterExtension` carries everything else to it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from das_verl.config import DasConfig
from das_verl.drafter import TreeStore
from das_verl.drafter.store import Request
from das_verl.scheduling import Lengths, StepCost, Trust, draft_prices
from das_verl.scheduling.lengths import LIKELY, remaining

# Engine steps between two insertions of verified tokens while nobody drafts: rare enough to cost nothing,
# often enough that a finished sibling leaves nearly all of its tokens in the tree.
_SYNC_EVERY = 16
# Engine steps between two settings of the prices, as long as the same requests run.
_PRICE_EVERY = 8
# Until the engine's steps have told what drafts cost: few, and only of tokens that are as likely right as wrong.
_COLD_VERIFY_TOKENS = 32.0
_COLD_PRICE = 0.5
# Weight of the newest step in what was drafted and accepted lately.
_NEWEST = 0.05
# What is known of a running request, by Request.slot.
_STATE = np.dtype(
    [
        ("start", np.int64),  # tokens of its prompt
        ("seen", np.int64),  # tokens of prompt and response that are in its tree
        ("end", np.int64),  # tokens at which it ends at the latest
        ("likely", np.float64, LIKELY),  # lengths that its response may get
        ("initial", np.int64),  # class of its length that its prompt's history gave it
        ("trust", np.int64),  # row of `Trust`
        ("price", np.float64),  # what a draft token must be worth, and
        ("budget", np.int64),  # most draft tokens
        ("last", np.int32),  # tokens drafted last, and
        ("expected", np.float64),  # how many of them were expected to be accepted
        ("drafted", np.float64),  # tokens per step lately, and
        ("accepted", np.float64),
        ("tally", np.int64, 3),  # drafted, accepted, verified in all
    ]
)


class Proposer:
    """Drafts from each tagged request's tree.

    A request is tagged by ``SamplingParams.extra_args["das"]``, the key of its prompt; others are left alone.

    Parameters
    ----------
    vllm_config : VllmConfig
        ``additional_config["das"]`` holds the ``das:`` section.

    Raises
    ------
    ConfigError
        If the section is missing or wrong.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = DasConfig.parse((vllm_config.additional_config or {}).get("das", {}))
        self._max_draft = min(self._config.max_draft, vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = vllm_config.model_config.max_model_len
        # The window is the scheduler's to keep: a trajectory may be several sequences here.
        self._store = TreeStore(window=sys.maxsize, max_bytes=int(self._config.tree_gb * 1e9))
        most = vllm_config.scheduler_config.max_num_seqs
        self._cost = StepCost(most, most * self._max_draft)
        self._cost_in_tokens = (math.nan, math.nan)  # of the engine step now, as `StepCost.in_tokens` returns it
        self._asked = 0  # drafted tokens of the engine step that runs
        classes = self._config.classes
        self._lengths = Lengths(classes.medium, classes.long)
        self._class_drafts = np.minimum([0, classes.medium_draft, classes.long_draft], self._max_draft)
        self._sizes = np.array([0, *(self._config.draft_sizes or range(1, self._max_draft + 1))], np.int32)
        self._trust = Trust()
        self._previous: list[str] = []  # requests of the engine step before
        self._ended = 0.0  # when that step's drafts were ready
        self._runner: Any = None
        self._requests: dict[str, Request] = {}
        self._counted: set[str] = set()  # of these, the ones that `counts` has told of
        self._batch: list[str] = []
        self._rows = np.empty(0, np.int64)
        self._slots = np.empty(0, np.int32)
        self._batch_requests: list[Request] = []
        self._priced = self._may_draft = False
        self._jump_tokens = 0.0
        self._state = np.zeros(64, _STATE)
        self._tree_bytes = 0
        self._reset_counts()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Check, when vLLM loads its models, that drafts cannot change what is sampled.

        Raises
        ------
        RuntimeError
            On a CPU whose vLLM build has the fault that :mod:`das_verl.vllm.fixes` mends, unmended.
        """
        from vllm.platforms import current_platform

        from das_verl.vllm.fixes import sampling_is_lossless

        if current_platform.is_cpu() and not sampling_is_lossless():
            raise RuntimeError(
                "this vLLM samples wrongly with speculation on a CPU, and das-verl's fix is not loaded; "
                "unset VLLM_PLUGINS or add das_verl to it"
            )

    def attach(self, runner: Any, tensor_parallel_rank: int = 0) -> None:
        """Take the model runner, which knows the request ids behind the rows of a batch.

        vLLM (gpu_model_runner.py, ``_input_fits_in_drafter``) asks for no drafts, and verifies zeros instead, for the
        whole batch as soon as one request comes within a draft of ``max_model_len``. That protects draft models;
        here each draft is cut to its request's room, so the limit is put out of reach.

        Of several tensor-parallel ranks vLLM takes the first one's drafts for all (its executors'
        ``take_draft_token_ids``). The others are not attached: they hold no trees, and cannot disagree.
        """
        if hasattr(runner, "effective_drafter_max_model_len"):
            runner.effective_drafter_max_model_len = self._max_model_len + self._max_draft + 1
        if tensor_parallel_rank != 0:
            return
        self._runner = runner

    def update(self, history: Mapping[Any, Sequence[Any]], released: Sequence[str] | None = ()) -> None:
        """Release trees, then start building others; returns at once.

        Parameters
        ----------
        history : mapping of str to sequence of int32 arrays
            What to index, by prompt key, oldest first.
        released : sequence of str, or None
            Prompt keys; None for all. A request that runs on under one of them is opened anew.
        """
        if self._runner is None:
            return
        self._tree_bytes = max(self._tree_bytes, self._store.stats().tree_bytes)
        gone = None if released is None else set(released)
        for req_id in [r for r, request in self._requests.items() if gone is None or request.key in gone]:
            self._close(req_id)
        self._batch = []
        self._rows = np.empty(0, np.int64)
        self._slots = np.empty(0, np.int32)
        self._batch_requests = []
        if released is None:
            self._store.end_step()
        else:
            self._store.release(released)
        self._lengths.forget(released)
        self._trust.forget(released)
        for key, sequences in history.items():
            self._lengths.add(key, [max(1, len(s) - self._config.prompt_tail) for s in sequences])
        self._store.add(history, threads=self._config.build_threads)

    def counts(self) -> dict[str, Any]:
        """Return the counts since the last call, in plain types for the RPC.

        Requests that are open count with what they did so far: vLLM tells of the last ones' end in its next step only.
        """
        for req_id, request in self._requests.items():
            self._count(req_id, request)
        self._counted = set(self._requests)
        stats = self._store.stats()
        counts = {
            "requests": self._told,
            "with_history": stats.requests_with_history - self._before.requests_with_history,
            "opened": stats.requests - self._before.requests,
            "draft_s": self._draft_s,
            "build_s": stats.build_s - self._before.build_s,
            "visible_s": stats.visible_s - self._before.visible_s,
            "tree_bytes": max(self._tree_bytes, stats.tree_bytes),
            "tokens": self._tokens,
            "steps": self._steps,
            "verify_tokens": self._cost_in_tokens[0],
        }
        self._reset_counts()
        return counts

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every row of the batch; called by vLLM after each engine step.

        Parameters
        ----------
        sampled_token_ids : list of list of int
            The verified tokens of each row; none for a row whose prompt is not finished.
        num_tokens_no_spec : ndarray of int, shape (at least rows,)
            Tokens of each row, prompt and verified.
        token_ids_cpu : ndarray of int32, shape (at least rows, max_model_len)
            The tokens themselves.
        slot_mappings : unused

        Returns
        -------
        list of list of int
            Drafted tokens of each row, possibly none.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._runner is None:
            return drafts
        start = time.perf_counter()
        self._clock += 1
        running = len(sampled_token_ids)
        self._time_step(running, start)
        self._match_rows(token_ids_cpu)
        if self._clock % _PRICE_EVERY == 0 or not self._priced:
            self._set_prices(running)
        if self._may_draft or self._clock % _SYNC_EVERY == 0:
            sampled = np.fromiter(map(bool, sampled_token_ids), bool, running)
            active = sampled[self._rows]
            if active.any():
                requests = [r for r, on in zip(self._batch_requests, active.tolist(), strict=True) if on]
                rows = self._rows[active]
                slots = self._slots[active]
                lengths = num_tokens_no_spec[rows].astype(np.int64)
                if self._insert(requests, rows, slots, lengths, token_ids_cpu) and self._may_draft:
                    self._draft(rows, slots, lengths, drafts)
        self._ended = time.perf_counter()
        self._draft_s += self._ended - start
        return drafts

    def _time_step(self, rows: int, now: float) -> None:
        """Note how long the engine step took that has just ended."""
        req_ids = self._runner.input_batch.req_ids
        # The first step after a pause includes the pause; no request in it was in the step before.
        goes_on = bool(self._previous) and not set(self._previous).isdisjoint(req_ids)
        # Where there are more tokens than rows and drafts, some are a prompt's, which is another kind of step.
        if goes_on and int(self._runner.query_start_loc.np[rows]) <= rows + self._asked:
            self._cost.observe(rows, self._asked, now - self._ended)
        self._asked = 0
        self._previous = list(req_ids)

    def _set_prices(self, running: int) -> None:
        """Settle what each request of the batch may draft until the next time, see :mod:`das_verl.scheduling`."""
        self._priced = True
        slots = self._slots
        state = self._state[slots]
        done = state["seen"] - state["start"]
        if self._config.policy == "classes":
            state["price"] = 0.0
            state["budget"] = self._class_drafts[self._lengths.classes(state["initial"], done)]
            self._may_draft = bool(state["budget"].any())
        else:
            left, price = np.empty(len(slots)), np.empty(len(slots))
            remaining(state["likely"].copy(), done, state["end"] - state["start"], left)
            if self._config.verify_tokens is not None:
                self._cost_in_tokens = float(self._config.verify_tokens), 0.0
            else:
                self._cost_in_tokens = self._cost.in_tokens(running)
            verify_tokens, self._jump_tokens = self._cost_in_tokens
            cold = math.isnan(verify_tokens)
            if cold:
                verify_tokens, self._jump_tokens = _COLD_VERIFY_TOKENS, 0.0
            lately = (state[name].copy() for name in ("accepted", "drafted"))
            self._may_draft = draft_prices(left, running - len(slots), verify_tokens, *lately, price)
            if cold:
                # Without drafts it would stay unknown what they cost.
                price = np.minimum(price, _COLD_PRICE)
                self._may_draft = True
            self._trust.fade()
            state["price"] = price / self._trust.shares(state["trust"])
            state["budget"] = self._max_draft
        self._state["price"][slots] = state["price"]
        self._state["budget"][slots] = state["budget"]

    def _match_rows(self, token_ids_cpu: np.ndarray) -> None:
        """Bring ``_rows`` and ``_batch_requests`` up to date with the rows that vLLM has now."""
        req_ids = self._runner.input_batch.req_ids
        if req_ids == self._batch:
            return
        states = self._runner.requests
        for req_id in [r for r in self._requests if r not in states]:
            self._close(req_id)
        rows, requests = [], []
        for row, req_id in enumerate(req_ids):
            request = self._requests.get(req_id)
            if request is None:
                request = self._open(req_id, states[req_id], row, token_ids_cpu)
            if request is not None:
                rows.append(row)
                requests.append(request)
        self._batch = list(req_ids)
        self._rows = np.array(rows, np.int64)
        self._slots = np.fromiter((r.slot for r in requests), np.int32, len(requests))
        self._batch_requests = requests
        self._priced = False

    def _open(self, req_id: str, state: Any, row: int, token_ids_cpu: np.ndarray) -> Request | None:
        params = state.sampling_params
        key = ((params and params.extra_args) or {}).get("das")
        if key is None:
            return None
        prompt = int(state.num_prompt_tokens)
        tail = token_ids_cpu[row, max(0, prompt - self._config.prompt_tail) : prompt]
        request = self._requests[req_id] = self._store.open(key, tail, params.temperature)
        while request.slot >= len(self._state):
            self._state = np.concatenate([self._state, np.zeros_like(self._state)])
        state = self._state[request.slot]
        lately = self._state[self._slots]
        state["start"] = state["seen"] = prompt
        state["end"] = min(self._max_model_len, prompt + (params.max_tokens or self._max_model_len))
        state["likely"] = self._lengths.likely(key)
        state["initial"] = self._lengths.initial_class(key)
        state["trust"] = self._trust.row(key)
        for name in ("drafted", "accepted"):
            state[name] = lately[name].mean() if len(lately) else 0.0
        for name in ("last", "expected", "tally"):
            state[name] = 0
        return request

    def _insert(
        self,
        requests: list[Request],
        rows: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
        token_ids_cpu: np.ndarray,
    ) -> bool:
        """Insert the tokens verified since the last time, and count what became of the last drafts.

        Returns False, and does nothing, where the tokens are not all known.
        """
        state = self._state[slots]
        new = np.maximum(lengths - state["seen"], 0)
        offsets = np.cumsum(new) - new
        columns = np.arange(int(new.sum())) + np.repeat(state["seen"] - offsets, new)
        tokens = token_ids_cpu[np.repeat(rows, new), columns]
        if tokens.min(initial=0) < 0:
            # The placeholder of a token that is not known yet: what follows it is not known either.
            return False
        self._store.advance(requests, tokens, new)
        self._tokens += int(new.sum())
        last = state["last"]
        verified = (last > 0) & (new > 0)
        self._steps += int(np.where(verified, 1, new).sum())
        accepted = np.where(verified, np.minimum(new - 1, last), 0)
        state["tally"] += np.where(verified[:, None], np.stack([last, accepted, np.ones_like(last)], axis=1), 0)
        if verified.any():
            self._trust.observe(state["trust"], accepted.astype(float), np.where(verified, state["expected"], 0.0))
        state["seen"] += new
        state["drafted"] += _NEWEST * (last - state["drafted"])
        state["accepted"] += _NEWEST * (accepted - state["accepted"])
        state["last"] = 0
        self._state[slots] = state
        return True

    def _draft(self, rows: np.ndarray, slots: np.ndarray, lengths: np.ndarray, drafts: list[list[int]]) -> None:
        state = self._state[slots]
        # A step yields its draft and one token more, so the last token of a request needs no draft.
        budgets = np.clip(state["end"] - lengths - 1, 0, state["budget"]).astype(np.int32)
        tokens = np.empty((len(slots), self._max_draft), np.int32)
        probs = np.empty(tokens.shape, np.float32)
        counts = np.empty(len(slots), np.int32)
        if self._store.propose_into(slots, budgets, tokens, counts, probs, state["price"].copy()):
            counts = self._sizes[np.searchsorted(self._sizes, counts, "right") - 1]
            expected = np.where(np.arange(self._max_draft) < counts[:, None], probs, 0.0).sum(axis=1)
            # What the drafts are worth, in tokens verified for it, must also make up for verifying any.
            worth = float(np.sum(expected / np.maximum(state["price"], 1e-9)))
            if worth < int(counts.sum()) + self._jump_tokens:
                return
            for i in np.flatnonzero(counts).tolist():
                drafts[rows[i]] = tokens[i, : counts[i]].tolist()
            self._state["last"][slots] = counts
            self._state["expected"][slots] = expected
            self._asked = int(counts.sum())

    def _close(self, req_id: str) -> None:
        request = self._requests.pop(req_id)
        self._count(req_id, request)
        state = self._state[request.slot]
        ended = req_id not in self._runner.requests
        if ended and state["seen"] > state["start"]:
            self._lengths.add(request.key, [int(state["seen"] - state["start"])])
        self._store.close(request)

    def _count(self, req_id: str, request: Request) -> None:
        tally = self._state["tally"][request.slot]
        if req_id not in self._counted or tally.any():
            self._told.append(tally.tolist())
            tally[:] = 0

    def _reset_counts(self) -> None:
        self._before = self._store.stats()
        self._told: list[list[int]] = []
        self._draft_s = 0.0
        self._tree_bytes = 0
        self._tokens = self._steps = self._clock = 0
