"""The scheduler: verl's request router, which also remembers rollouts and tells the replicas which trees to hold.

verl creates one Ray actor of :data:`SchedulerActor` from ``rollout.router_config_path`` and hands it every rollout
server. Its callers: verl's LLM client (routing), :mod:`das_verl.verl.agent_loop` (what is drawn, opened, reported
and finished), :mod:`das_verl.verl.server` (rollout over), :mod:`das_verl.verl.checkpoint` (snapshots).

A prompt's trees live from the moment it is drawn, or known to be drawn next, to the moment its last rollout is
finished, whichever training step that falls into.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from das_verl.config import DasConfig
from das_verl.history import SnapshotError, Trajectory, TrajectoryWindow, snapshot
from das_verl.scheduling import Placement
from das_verl.verl.metrics import collapsed, summarise
from das_verl.vllm.worker import pack_history

_log = logging.getLogger(__name__)
# Finished siblings go to the other replicas at most this often: each time costs an engine step's interruption.
_SHARE_EVERY_S = 0.5
_SERVER_TIMEOUT_S = 60.0


class Scheduler(GlobalRequestLoadBalancer):
    """Spreads the expected work of a batch over the servers, and keeps the trajectory window.

    Until :meth:`configure` is called, which includes the time after a crash and restart of its actor, it only routes,
    as verl does by default; requests that are not of training it always routes so.

    Parameters
    ----------
    servers : dict of str to actor handle
        Every rollout server, by address.
    router_config : dict
        The router file's content. Holds nothing but this class's name.
    """

    def __init__(self, servers: dict[str, Any], router_config: dict[str, Any]) -> None:
        super().__init__(servers)
        self._config: DasConfig | None = None
        self._history = TrajectoryWindow(1, 0)
        self._placement = Placement(self._expected_length)
        self._began = 0.0  # when the prompts were drawn that came after all others had finished
        self._done: dict[str, float] = {}  # when a training request last ended since, by address of the server
        self._warm: dict[str, list[Trajectory]] = {}  # by hash of the prompt's text, until its key is known
        self._key_of_prompt: dict[str, str] = {}
        self._drawn: Counter[str] = Counter()  # prompts whose rollouts are not all finished, by fingerprint
        self._next: list[str] = []  # fingerprints of the prompts that are drawn next, as far as known
        self._indexed: set[str] = set()  # keys that the replicas hold trees of history for
        self._ahead: set[str] = set()  # of these, the ones built for prompts that are not drawn yet
        self._finished: list[str] = []  # keys whose trees the replicas can release
        self._siblings: list[tuple[str, str | None, Trajectory]] = []  # key, server that has it, what it generated
        self._shared_at = 0.0
        self._connected: set[str] = set()  # addresses of the servers that hold what they should
        self._last_update: dict[str, Any] = {}  # reference to the outcome, by address of the server
        self._unreachable: set[str] = set()
        self._accept_rates: deque[float] = deque(maxlen=20)  # of the newest steps that drafted

    def configure(
        self,
        das: dict[str, Any],
        saved: bytes | None = None,
        warm: Mapping[str, Any] | None = None,
        full_determinism: bool = False,
    ) -> str:
        """Take the ``das:`` section and what earlier runs left; called by the agent-loop manager.

        Parameters
        ----------
        das : dict
            The ``das:`` section.
        saved : bytes, optional
            A snapshot.
        warm : mapping of str to list of Trajectory, optional
            Trajectories from rollout dumps, by hash of the prompt's text.
        full_determinism : bool
            Route by the hash of the request's id alone, as verl does when its setting of this name is on.

        Returns
        -------
        str
            What was wrong with the snapshot; empty if nothing was. The history is empty then.
        """
        self._config = config = DasConfig.parse(das)
        self._history = TrajectoryWindow(config.window, max_bytes=int(config.history.gb * 1e9))
        self._warm = dict(warm or {})
        self._full_determinism = full_determinism
        if saved is not None:
            try:
                self._key_of_prompt = snapshot.load(saved, self._history)
            except SnapshotError as error:
                return str(error)
        return ""

    def begin_step(self, prompts: Sequence[str], upcoming: Sequence[str] = (), rollouts: int = 1) -> list[int] | None:
        """Note that prompts are drawn, and see to it that the replicas build their trees; called for every batch.

        Parameters
        ----------
        prompts : sequence of str
            Fingerprints of the raw prompts. Their token ids are not known before the agent loops tokenise them,
            but a prompt that has history reported its key together with its fingerprint.
        upcoming : sequence of str
            Fingerprints of the prompts that will be drawn next, where that is known.
        rollouts : int
            Rollouts of each of ``prompts``.

        Returns
        -------
        list of int, or None
            Tokens that a response to each of ``prompts`` is expected to have. None if this actor has restarted and
            must be configured again.
        """
        if self._config is None:
            return None
        if not self._drawn:
            self._began = time.monotonic()
            self._done.clear()
        self._connect()
        self._forget_names()
        keys = self._keys(prompts)
        self._ahead = (self._ahead & self._keys(upcoming).keys()) - keys.keys()
        self._update(keys)
        self._drawn.update(prompts)
        self._next = list(upcoming)
        requests = [self._key_of_prompt.get(p) for p in prompts]
        self._placement.expect(requests * rollouts)
        return [self._expected_length(key) for key in requests]

    def first_seen(self, prompts: Sequence[tuple[str, str, str]]) -> None:
        """Build trees from a warm start's history; called by the agent-loop workers, before a prompt's first request.

        Parameters
        ----------
        prompts : sequence of (str, str, str)
            Fingerprint and key of each prompt, and the hash of its text, which is all that rollout dumps know of it.
        """
        found: dict[str, None] = {}
        for prompt, key, text in prompts:
            warm = self._warm.pop(text, [])
            for trajectory in warm if key not in self._history else []:
                self._history.add(key, trajectory)
            if key in self._history:
                self._key_of_prompt[prompt] = key
                found[key] = None
        if self._config is not None:
            self._update(found)

    def report(self, prompt: str, key: str, request_id: str, trajectory: Trajectory) -> None:
        """Remember a finished training trajectory; called by the agent-loop workers.

        Parameters
        ----------
        prompt : str
            Fingerprint of the raw prompt.
        key : str
            Key of the prompt's token ids.
        request_id : str
            Of the trajectory's last request, which tells the replica that generated it.
        trajectory : Trajectory
        """
        if self._config is None:
            return
        self._key_of_prompt[prompt] = key
        self._history.add(key, trajectory)
        self._placement.revise()
        if len(self._servers) > 1 and self._drawn[prompt] > 0:
            self._siblings.append((key, self._request_id_to_server.get(request_id), trajectory))
            if time.monotonic() - self._shared_at > _SHARE_EVERY_S:
                self._share()

    def finished(self, prompt: str, keys: Sequence[str]) -> None:
        """Note that all rollouts of a drawn prompt have ended, well or not; called by the agent-loop workers.

        ``keys`` are those that its requests carried.
        """
        self._drawn[prompt] -= 1
        if self._drawn[prompt] <= 0:
            del self._drawn[prompt]
            self._finished += keys

    def rollout_over(self) -> None:
        """Release the trees that are done with and build the next batch's; called by every server as it goes to sleep.

        The policy is updated meanwhile.
        """
        if self._config is not None:
            self._ahead |= self._update(self._keys(self._next))

    def require_acquire_fields(self) -> list[str]:
        """What :meth:`acquire_server` wants to know of a request; called by verl's client."""
        return ["sampling_params"]

    def require_release_fields(self) -> list[str]:
        """What :meth:`release_server` wants to know of a request; called by verl's client."""
        return ["request_id"]

    def acquire_server(self, request_id: str, sampling_params: Mapping[str, Any] | None = None) -> tuple[str, Any]:
        """Return the address and the handle of the server that shall run a request; called by verl's client.

        A request with a prompt's key in its ``sampling_params`` goes where it was planned, and the later requests of
        its id to the same server. Other requests are routed as verl does.
        """
        key = ((sampling_params or {}).get("extra_args") or {}).get("das")
        if key is not None and self._config is not None and self._servers and not self._full_determinism:
            server = self._request_id_to_server.get(request_id)
            server = self._placement.start(request_id, key, self._servers, server)
            # Where verl's router looks first.
            self._request_id_to_server[request_id] = server
        return super().acquire_server(request_id)

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Note that a request has ended; called by verl's client."""
        super().release_server(server_id, request_id)
        if request_id is not None and self._placement.end(request_id, server_id):
            self._done[server_id] = time.monotonic()

    def remove_servers(self, server_ids: list[str]) -> None:
        """Remove servers from the pool, as verl does; they miss what the others are told from now on."""
        super().remove_servers(server_ids)
        self._connected.difference_update(server_ids)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call; called once per training step."""
        metrics = summarise(self._counts())
        if collapsed(metrics, self._accept_rates):
            _log.warning(
                "only %.0f%% of the drafted tokens were accepted in this step, where %.0f%% were before: "
                "the policy no longer says what it said, and das drafts less until it does",
                100 * metrics["das/accept_rate"],
                100 * statistics.median(self._accept_rates),
            )
        if metrics["das/draft_tokens"]:
            self._accept_rates.append(metrics["das/accept_rate"])
        metrics["das/history_bytes"] = self._history.nbytes
        metrics["das/history_trajectories"] = len(self._history)
        metrics["das/history_prompts"] = self._history.num_keys
        metrics["das/history_evicted"] = self._history.evicted
        self._history.evicted = 0
        busy = [self._done.get(address, self._began) - self._began for address in self._servers]
        if any(busy):
            metrics["das/finish_spread"] = max(busy) * len(busy) / sum(busy)
        return metrics

    def save(self) -> bytes | None:
        """Return a snapshot of the history, None if this actor has restarted and must be configured again."""
        return None if self._config is None else snapshot.dump(self._history, self._key_of_prompt)

    def _expected_length(self, key: str | None) -> int:
        """Tokens of a prompt's next response, at least 1; the mean over all prompts where it has no history."""
        return max(1, round(self._history.mean_length(key)))

    def _keys(self, prompts: Sequence[str] | Mapping[str, Any]) -> dict[str, None]:
        """Keys of the prompts that have one, each once, in order."""
        return dict.fromkeys(self._key_of_prompt[p] for p in prompts if p in self._key_of_prompt)

    def _update(self, wanted: Mapping[str, None]) -> set[str]:
        """Let the replicas release what nobody needs and build what of ``wanted`` they lack.

        Returns the keys whose trees they build.
        """
        running = self._keys(self._drawn).keys()
        needed = running | wanted.keys() | self._ahead
        # What is finished and wanted again is built anew, from the newest history. A tree that nobody needs and no
        # request has finished with is that of a prompt whose token ids have changed, or which made no request.
        released = dict.fromkeys(k for k in self._finished if k not in running)
        released |= dict.fromkeys(sorted(self._indexed - needed))
        self._finished.clear()
        self._siblings = [s for s in self._siblings if s[0] not in released]
        self._indexed -= released.keys()
        added = self._history.get(k for k in wanted if k not in self._indexed)
        self._indexed |= added.keys()
        if added or released:
            packed = ray.put(pack_history(self._sequences(added)))
            for address in self._connected:
                self._send(address, packed, list(released))
        return set(added)

    def _share(self) -> None:
        """Send what each replica's requests have finished to the other replicas."""
        self._shared_at = time.monotonic()
        siblings, self._siblings = self._siblings, []
        for address in self._connected:
            foreign: dict[str, list[Trajectory]] = {}
            for key, has_it, trajectory in siblings:
                if has_it != address:
                    foreign.setdefault(key, []).append(trajectory)
            if foreign:
                self._send(address, pack_history(self._sequences(foreign)), [])

    def _send(self, address: str, packed: Any, released: list[str] | None) -> None:
        """Let a server update its trees, and do not wait for it."""
        # Calls of an async actor may overtake one another; Ray starts one only when its arguments are there.
        after = self._last_update.get(address)
        self._last_update[address] = self._servers[address].das_update.remote(packed, released, after)

    def _sequences(self, history: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[Any]]:
        assert self._config is not None
        tail = self._config.prompt_tail
        return {key: [s for t in trajectories for s in t.sequences(tail)] for key, trajectories in history.items()}

    def _counts(self) -> list[dict[str, Any]]:
        """Return what the replicas counted since the last call.

        The one call that waits: requests are routed in this actor, so it must not hang on a replica. One that has
        died is verl's to deal with; its trees died with it.
        """
        asked: dict[str, Any] = {a: s.das_counts.remote(self._last_update.get(a)) for a, s in self._servers.items()}
        answers: list[dict[str, Any]] = []
        for address, reference in asked.items():
            try:
                answers.append(ray.get(reference, timeout=_SERVER_TIMEOUT_S))
                self._unreachable.discard(address)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._connected.discard(address)  # what comes after a failed update would fail with it
                if address not in self._unreachable:
                    self._unreachable.add(address)
                    why = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                    _log.warning("rollout server %s does not answer, going on without: %s", address, why[0])
        return answers

    def _connect(self) -> None:
        """Bring servers that are new, or back, to what the others hold; what they held before is out of date."""
        for address in self._servers.keys() - self._connected:
            self._last_update.pop(address, None)
            self._servers[address].das_connect.remote(ray.get_runtime_context().current_actor)
            self._send(address, pack_history(self._sequences(self._history.get(self._indexed))), None)
            self._connected.add(address)

    def _forget_names(self) -> None:
        """Forget the names of prompts whose history has been evicted."""
        if len(self._key_of_prompt) > 2 * self._history.num_keys + 1024:
            self._key_of_prompt = {p: k for p, k in self._key_of_prompt.items() if k in self._history or self._drawn[p]}


# Routing must survive a crash: Ray starts the actor again, and repeats the calls that it had not answered.
SchedulerActor = ray.remote(max_restarts=-1, max_task_retries=-1)(Scheduler)
