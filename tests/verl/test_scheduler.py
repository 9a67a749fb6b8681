"""What the scheduler, the server and the agent loop hand each other; Ray, engine and client are stand-ins here."""

from __future__ import annotations

import asyncio
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from das_verl.history import Trajectory, TrajectoryWindow, prompt_key, snapshot
from das_verl.verl import agent_loop, metrics, scheduler
from das_verl.verl.server import Server
from das_verl.vllm.worker import unpack_history

COUNTS = {
    "requests": [[8, 6, 2], [0, 0, 0]],
    "with_history": 1,
    "opened": 2,
    "draft_s": 0.5,
    "build_s": 0.25,
    "visible_s": 0.05,
    "tree_bytes": 100,
    "tokens": 30,
    "steps": 20,
    "verify_tokens": 40.0,
}


class FakeServer:
    """A rollout server's Ray handle, keeping what a replica's proposer would hold."""

    def __init__(self) -> None:
        self.trees: dict[str, list[list[int]]] = {}
        self.updates = 0
        self.connected: list[Any] = []
        self.das_connect = SimpleNamespace(remote=self.connected.append)
        self.das_update = SimpleNamespace(remote=self.update)
        self.das_counts = SimpleNamespace(remote=lambda after: COUNTS)

    def update(self, packed: dict[str, Any], released: list[str] | None, after: int | None) -> int:
        assert after in (None, self.updates), "updates must be told to wait for the one before"
        for key in list(self.trees) if released is None else released:
            self.trees.pop(key, None)
        for key, sequences in unpack_history(packed).items():
            self.trees.setdefault(key, []).extend(s.tolist() for s in sequences)
        self.updates += 1
        return self.updates


@pytest.fixture
def servers(monkeypatch) -> dict[str, FakeServer]:
    context = SimpleNamespace(current_actor="scheduler")
    ray = SimpleNamespace(
        put=lambda x: x,
        get=lambda x, timeout=None: x,
        get_runtime_context=lambda: context,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    monkeypatch.setattr(scheduler, "ray", ray)
    return {"a": FakeServer(), "b": FakeServer()}


@pytest.fixture
def sched(servers, das_section) -> scheduler.Scheduler:
    sched = scheduler.Scheduler(servers, {"router_class": "..."})
    assert sched.configure(das_section | {"window": 2, "prompt_tail": 2}) == ""
    return sched


def trajectory(*response: int) -> Trajectory:
    return Trajectory.of([5, 6, 7], response, prompt_tail=2)


def rollout(sched: scheduler.Scheduler, name: str, *responses: int, key: str | None = None) -> None:
    """All of a drawn prompt's trajectories end."""
    key = key or f"key of {name}"
    for response in responses:
        sched.report(name, key, "id", trajectory(response))
    sched.finished(name, [key])


def test_every_replica_gets_the_history_of_the_steps_prompts_alone(sched, servers):
    sched.begin_step(["question", "another"])
    rollout(sched, "question", 1, 2, 3)
    rollout(sched, "another", 4)
    sched.rollout_over()
    sched.begin_step(["question", "question", "new"])
    for server in servers.values():
        assert server.trees == {"key of question": [[6, 7, 2], [6, 7, 3]]}
        assert server.connected == ["scheduler"]


def test_trees_go_when_the_last_rollout_of_their_prompt_has_ended(sched, servers):
    sched.begin_step(["q", "r"])
    rollout(sched, "q", 1)
    rollout(sched, "r", 2)
    sched.begin_step(["q", "q", "r"])
    rollout(sched, "q", 3)
    rollout(sched, "r", 4)
    sched.rollout_over()
    assert list(servers["a"].trees) == ["key of q"]  # it was drawn twice, and one of the two still runs
    sched.finished("q", ["key of q"])
    sched.rollout_over()
    assert servers["a"].trees == {}


def test_an_aborted_prompts_trees_go_too(sched, servers):
    sched.begin_step(["q"])
    for server in servers.values():
        server.trees["key of q"] = [[1]]  # opened by a request
    sched.finished("q", ["key of q"])
    sched.rollout_over()
    assert servers["a"].trees == {}


def test_the_next_batchs_trees_are_built_while_the_policy_is_updated(sched, servers):
    sched.begin_step(["q"], upcoming=["r"])
    rollout(sched, "q", 1)
    rollout(sched, "r", 2)
    updates = servers["a"].updates
    sched.rollout_over()
    sched.rollout_over()  # every server says so
    assert servers["a"].trees == {"key of r": [[6, 7, 2]]}
    assert servers["a"].updates == updates + 1
    sched.begin_step(["r"], upcoming=["q"])
    assert servers["a"].updates == updates + 1  # it was there already
    sched.rollout_over()
    assert set(servers["a"].trees) == {"key of q", "key of r"}  # r still runs


def test_trees_built_ahead_in_vain_are_released(sched, servers):
    sched.begin_step(["q"], upcoming=["q"])
    rollout(sched, "q", 1)
    sched.rollout_over()
    assert set(servers["a"].trees) == {"key of q"}
    sched.begin_step(["other"])
    assert servers["a"].trees == {}


def test_siblings_reach_the_other_replicas_within_the_step(sched, servers, monkeypatch):
    monkeypatch.setattr(scheduler, "_SHARE_EVERY_S", -1.0)
    sched.begin_step(["q"])
    address, _ = sched.acquire_server("request")
    sched.report("q", "key of q", "request", trajectory(1, 2))
    other = "b" if address == "a" else "a"
    assert servers[other].trees == {"key of q": [[6, 7, 1, 2]]}
    assert servers[address].trees == {}
    sched.finished("q", ["key of q"])
    sched.rollout_over()
    assert servers[other].trees == {}


def test_replicas_may_come_and_go(sched, servers):
    sched.begin_step(["q", "r"])
    rollout(sched, "q", 1)
    sched.begin_step(["q"])
    late = FakeServer()
    sched.add_servers({"c": late})
    sched.remove_servers(["a"])
    sched.begin_step(["s"])
    assert late.trees == servers["b"].trees == {"key of q": [[6, 7, 1]]}
    # One that comes back has missed updates.
    servers["a"].trees["stale"] = [[1]]
    servers["a"].updates = 0
    sched.add_servers({"a": servers["a"]})
    sched.begin_step(["s"])
    assert servers["a"].trees == late.trees


def test_what_a_replica_missed_while_it_was_away_does_not_stay_there(sched, servers, monkeypatch):
    monkeypatch.setattr(scheduler, "_SHARE_EVERY_S", -1.0)
    sched.begin_step(["q", "r"])
    rollout(sched, "q", 1)
    rollout(sched, "r", 1)
    sched.begin_step(["q"], upcoming=["r"])
    back, late = servers["a"], FakeServer()
    sched.remove_servers(["a"])
    rollout(sched, "q", 2)
    sched.rollout_over()
    sched.add_servers({"a": back, "c": late})
    sched.report("q", "key of q", "id", trajectory(3))  # siblings are sent before the next batch is drawn
    back.updates = 0
    sched.begin_step(["r"])
    assert back.trees == late.trees == servers["b"].trees == {"key of r": [[6, 7, 1]]}
    assert late.connected == ["scheduler"]


def test_trees_go_even_if_no_request_came_or_the_prompts_ids_have_changed(sched, servers):
    sched.begin_step(["q", "r"])
    rollout(sched, "q", 1)
    rollout(sched, "r", 1)
    sched.begin_step(["q", "r"])
    rollout(sched, "q", 2, key="another key of q")  # a template with today's date in it
    sched.finished("r", [])
    sched.rollout_over()
    assert servers["a"].trees == {}


def test_what_is_still_to_come_is_kept_when_a_prompt_comes_between(sched, servers):
    sched.begin_step(["q", "r"], upcoming=["q", "r"])
    rollout(sched, "q", 1)
    rollout(sched, "r", 1)
    sched.rollout_over()
    updates = servers["a"].updates
    sched.begin_step(["in between"], upcoming=["q", "r"])
    assert set(servers["a"].trees) == {"key of q", "key of r"}
    assert servers["a"].updates == updates


def request(sched: scheduler.Scheduler, request_id: str, key: str | None = None) -> str:
    """Acquire a server as verl's client does, with the key that the agent loops add to training requests."""
    params = {"temperature": 1.0} | ({} if key is None else {"extra_args": {"das": key}})
    assert sched.require_acquire_fields() == ["sampling_params"]
    address, handle = sched.acquire_server(request_id=request_id, sampling_params=params)
    assert handle is sched._servers[address]
    return address


def test_the_work_of_a_batch_is_spread_evenly(sched):
    sched.begin_step(["long", "short", "new"])
    for name, length in (("long", 30), ("short", 3)):
        sched.report(name, f"key of {name}", "id", trajectory(*range(length)))
        sched.finished(name, [f"key of {name}"])
    sched.finished("new", [])
    assert sched.begin_step(["short", "new", "long"], rollouts=2) == [3, 16, 30]  # new: the mean, rounded
    at = {(name, i): request(sched, f"{name} {i}", f"key of {name}") for i in (0, 1) for name in ("short", "new")}
    at |= {("long", i): request(sched, f"long {i}", "key of long") for i in (0, 1)}
    for name in ("long", "new", "short"):
        assert {at[name, 0], at[name, 1]} == {"a", "b"}
    # A third one comes, as nobody said.
    first = request(sched, "more", "key of long")
    assert request(sched, "and more", "key of short") != first


def test_later_requests_of_a_trajectory_go_to_its_server(sched):
    sched.begin_step(["q"], rollouts=2)
    first = request(sched, "turns", "key")
    request(sched, "other", "key")
    for _ in range(5):
        sched.release_server(first, "turns")
        assert request(sched, "turns", "key") == first
    assert sched.get_total_inflight() == 2
    sched.remove_servers([first])
    assert request(sched, "turns", "key") != first


def test_releases_make_room(sched):
    sched.begin_step(["q"])
    rollout(sched, "q", *range(1, 3))
    sched.begin_step(["q"], rollouts=4)
    at = [request(sched, f"{i}", "key of q") for i in range(4)]
    for i in range(4):
        if at[i] == "b":
            sched.release_server("b", f"{i}")
    assert [request(sched, f"next {i}", "key of q") for i in range(2)] == ["b", "b"]
    sched.add_servers({"c": FakeServer()})
    assert request(sched, "last", "key of q") == "c"
    sched.remove_servers(["a", "b"])
    sched.release_server("a", "0")
    assert request(sched, "after", "key of q") == "c"
    sched.remove_servers(["c"])
    with pytest.raises(RuntimeError, match="No available servers"):
        request(sched, "none", "key of q")


def test_what_is_not_training_is_routed_as_verl_does(sched, servers):
    sched.begin_step(["q"], rollouts=2)
    before = scheduler.Scheduler(servers, {})  # not configured
    for router, key in ((sched, None), (before, None), (before, "key")):
        at = [request(router, f"{key} {i}", key) for i in range(4)]
        assert sorted(at) == ["a", "a", "b", "b"]
        for i, address in enumerate(at):
            router.release_server(address, f"{key} {i}")
        assert "das/finish_spread" not in router.metrics()
        assert router.get_total_inflight() == 0
    assert before.acquire_server("no parameters")[0] in servers


def test_under_full_determinism_the_id_alone_decides(servers, das_section):
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    sched = scheduler.Scheduler(servers, {})
    sched.configure(das_section, full_determinism=True)
    sched.begin_step(["q"], rollouts=8)
    verls = GlobalRequestLoadBalancer(servers, full_determinism=True)
    for i in range(20):
        assert request(sched, f"det-{i % 15}", "key") == verls.acquire_server(f"det-{i % 15}")[0]


def test_how_evenly_the_servers_finish(sched, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for drawn in (["q"], ["q"]):  # the second batch is measured from its own beginning
        sched.begin_step(drawn, rollouts=4)
        at = [request(sched, f"{i}", "key") for i in range(4)]
        assert sorted(at) == ["a", "a", "b", "b"]
        for i, address in enumerate(at):
            now[0] += {"a": 1, "b": 4}[address]
            sched.release_server(address, f"{i}")
        first, last = (6, 10) if at[-1] == "b" else (9, 10)
        assert sched.metrics()["das/finish_spread"] == pytest.approx(last / ((first + last) / 2))
        sched.finished("q", ["key"])
        now[0] += 1000


def test_after_a_restart_history_is_the_snapshots_and_the_replicas_start_afresh(sched, servers, das_section):
    sched.begin_step(["q"])
    rollout(sched, "q", 1)
    saved = sched.save()
    sched.begin_step(["q"])
    for server in servers.values():
        server.updates = 0  # the actor's memory of them dies with it
    again = scheduler.Scheduler(servers, {})
    again.report("q", "key of q", "id", trajectory(9))
    again.finished("q", ["key of q"])
    again.release_server(request(again, "id", "key of q"), "id")
    again.release_server("a", "from before")
    again.rollout_over()
    assert again.save() is None
    assert again.begin_step(["q"]) is None
    assert again.configure(das_section, saved) == ""
    assert again.begin_step(["q"]) == [1]
    assert servers["a"].trees == {"key of q": [[6, 7, 1]]}
    assert again.save() == saved


def test_a_damaged_snapshot_is_told_and_history_starts_empty(servers, das_section):
    sched = scheduler.Scheduler(servers, {})
    assert "damaged or something else" in sched.configure(das_section, b"PK, but not a snapshot")
    assert sched.begin_step(["q"])
    assert sched.metrics()["das/history_trajectories"] == 0


def test_a_warm_start_builds_trees_on_first_use(servers, das_section):
    sched = scheduler.Scheduler(servers, {})
    sched.configure(das_section, None, {"text": [trajectory(1), trajectory(2)]})
    sched.begin_step(["q"])
    sched.first_seen([("q", "key", "text"), ("r", "other", "unknown text")])
    assert servers["b"].trees == {"key": [[6, 7, 1], [6, 7, 2]]}
    assert sched.metrics()["das/history_prompts"] == 1


def test_a_runs_own_history_is_newer_than_its_warm_start(servers, das_section):
    sched = scheduler.Scheduler(servers, {})
    sched.configure(das_section)
    sched.begin_step(["q"])
    rollout(sched, "q", 7)
    resumed = scheduler.Scheduler(servers, {})
    resumed.configure(das_section, sched.save(), {"text": [trajectory(1)]})
    resumed.begin_step(["q"])
    resumed.first_seen([("q", "key of q", "text")])
    assert resumed.save() == sched.save()


def test_names_of_forgotten_prompts_do_not_pile_up(servers, das_section):
    sched = scheduler.Scheduler(servers, {})
    sched.configure(das_section | {"history": {"gb": 1e-6, "warm_start": None}})  # a kilobyte
    for i in range(5000):
        sched.begin_step([f"q{i}"])
        rollout(sched, f"q{i}", i)
    assert sched.metrics()["das/history_bytes"] <= 1000
    window = TrajectoryWindow(9, 10**6)
    assert len(snapshot.load(sched.save(), window)) == window.num_keys
    assert len(sched._key_of_prompt) < 2000


def test_metrics_add_up_over_replicas(sched):
    sched.begin_step(["question"])
    sched.report("question", "key", "id", trajectory(1, 2))
    got = sched.metrics()
    assert got["rollout/spec_accept_rate"] == pytest.approx(0.375)  # mean of 6/8, 0, 6/8, 0
    assert got["rollout/spec_accept_length"] == pytest.approx(2.0)  # mean of 1 + 6/2, 0 twice
    assert got["das/draft_tokens"] == 16
    assert got["das/accept_rate"] == 0.75
    assert got["das/tokens_per_step"] == 4.0
    assert got["das/tokens_per_step_all"] == 1.5
    assert got["das/history_share"] == 0.5
    assert got["das/draft_s"] == 0.5
    assert got["das/build_visible_s"] == 0.05
    assert got["das/build_hidden_s"] == pytest.approx(0.2)
    assert got["das/history_bytes"] == trajectory(1, 2).nbytes
    assert got["das/history_trajectories"] == 1


def test_a_dead_replica_is_told_once_and_the_others_go_on(sched, servers, log):
    sched.begin_step(["q"])

    def die(after: Any) -> Any:
        raise RuntimeError("the actor died\nbecause of this")

    healthy = servers["a"].das_counts
    # The stand-in for ray.get answers at once, so the error is raised by a lazy value.
    servers["a"].das_counts = SimpleNamespace(remote=lambda after: die)
    scheduler.ray.get = lambda x, timeout=None: x(None) if callable(x) else x
    for _ in range(2):
        assert sched.metrics()["das/draft_tokens"] == 8
    assert log.messages == ["rollout server a does not answer, going on without: because of this"]
    servers["a"].das_counts = healthy
    servers["a"].updates = 0
    sched.begin_step(["q"])
    assert sched.metrics()["das/draft_tokens"] == 16


def test_a_warning_when_acceptance_collapses_for_a_step(sched, servers, log):
    def step(accepted: int) -> None:
        counts = COUNTS | {"requests": [[1000, accepted, 500]]}
        for server in servers.values():
            server.das_counts = SimpleNamespace(remote=lambda after: counts)
        sched.metrics()

    for accepted in (0, 500, 600, 550, 300):  # the first step has nothing to be compared with
        step(accepted)
    assert not log.messages
    step(50)
    assert log.messages[0].startswith("only 5% of the drafted tokens were accepted in this step, where 50% were")
    step(500)
    assert len(log.messages) == 1


def test_metrics_of_a_step_without_requests_are_finite():
    idle = {"requests": [], "tokens": 0, "steps": 0, "with_history": 0, "opened": 0, "verify_tokens": float("nan")}
    got = metrics.summarise([COUNTS | idle])
    assert all(np.isfinite(v) for v in got.values())


def test_logging_twice_adds_the_metrics_once(monkeypatch):
    from verl.trainer.ppo.v1 import trainer_base

    monkeypatch.setattr(trainer_base, "compute_spec_decode_metrics", trainer_base.compute_spec_decode_metrics)
    calls: list[int] = []
    for _ in range(2):
        metrics.log_speculation(lambda: calls.append(1) or {"das/x": 1.0})
    assert trainer_base.compute_spec_decode_metrics(None, None, None, None) == {"das/x": 1.0}
    assert calls == [1]
    # Figures that verl has itself win.
    metrics.log_speculation(lambda: {"rollout/spec_accept_rate": -1.0})
    assert trainer_base.compute_spec_decode_metrics([4], [1], [2])["rollout/spec_accept_rate"] == 0.25


class Client:
    """verl's LLM client: records the sampling parameters and priorities that reach it."""

    tokenizer = "inner"

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.priorities: list[int] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority=0, **kwargs):
        self.seen.append(sampling_params)
        self.priorities.append(priority)


def test_all_requests_of_a_trajectory_carry_its_first_prompts_key():
    client = Client()
    first_seen: list[Any] = []
    tagging = agent_loop.TaggingClient(client, lambda *call: first_seen.append(call))

    async def one(drawn: agent_loop.Drawn, prompt: list[int]) -> None:
        agent_loop._running.set(agent_loop.Running(drawn))
        params = {"temperature": 1.0, "extra_args": {"mine": 1}}
        await tagging.generate("id", prompt_ids=prompt, sampling_params=params)
        # A later turn, or the same request resumed after an abort.
        await tagging.generate("id", prompt_ids=[*prompt, 8, 9], sampling_params=params)
        assert params == {"temperature": 1.0, "extra_args": {"mine": 1}}

    async def run() -> None:
        drawn = {i: agent_loop.Drawn(f"question {i}") for i in (1, 2)}
        await asyncio.gather(*(asyncio.create_task(one(drawn[i], [i])) for i in (1, 2, 2)))
        assert drawn[2].keys == {prompt_key([2])}
        # Outside of a training trajectory nothing is added.
        await tagging.generate("id", prompt_ids=[1], sampling_params={"temperature": 0.0})

    asyncio.run(run())
    assert sorted(s["extra_args"]["das"] for s in client.seen[:6]) == sorted(
        [prompt_key([1])] * 2 + [prompt_key([2])] * 4
    )
    assert client.seen[0]["extra_args"]["mine"] == 1
    assert client.seen[6] == {"temperature": 0.0}
    assert first_seen == [(f"question {i}", prompt_key([i]), [i]) for i in (1, 2)]


def test_what_is_expected_to_be_longest_goes_first():
    client = Client()
    tagging = agent_loop.TaggingClient(client)

    async def run() -> None:
        for length in (7, 0):
            agent_loop._running.set(agent_loop.Running(agent_loop.Drawn("q", length)))
            for more in ({}, {"priority": 0}, {"priority": 3}):  # verl's own agent loop says 0 for none
                await tagging.generate("id", prompt_ids=[1], sampling_params={}, **more)
        agent_loop._running.set(None)
        await tagging.generate("id", prompt_ids=[1], sampling_params={})

    asyncio.run(run())
    assert client.priorities == [-7, -7, 3, 0, 0, 3, 0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workers_learn_how_long_responses_are_expected_to_be(monkeypatch, deterministic):
    dispatched: list[Any] = []
    monkeypatch.setattr(
        agent_loop.AgentLoopManagerTQ, "generate_sequences", lambda self, batch: dispatched.append(batch)
    )
    monkeypatch.setattr(agent_loop, "ray", SimpleNamespace(get=lambda answer: answer))
    monkeypatch.setattr(agent_loop, "upcoming_prompts", lambda: [["r"]])
    calls: list[Any] = []
    answers = iter([None, [5, 9]])  # it had restarted

    def begin_step(*args: Any) -> Any:
        calls.append(args)
        return next(answers)

    manager = agent_loop.AgentLoopManager.__new__(agent_loop.AgentLoopManager)
    manager.scheduler = SimpleNamespace(begin_step=SimpleNamespace(remote=begin_step))
    manager._rollout = SimpleNamespace(n=4, full_determinism=deterministic)
    manager.restore_scheduler = lambda: calls.append("restored")
    batch = {"raw_prompt": [["q"], ["p"]]}
    manager.generate_sequences(batch)
    step = ([agent_loop.fingerprint(p) for p in batch["raw_prompt"]], [agent_loop.fingerprint(["r"])], 4)
    assert calls == [step, "restored", step]
    assert list(batch) == ["raw_prompt"]
    assert [list(b) for b in dispatched] == [["raw_prompt"] + ([] if deterministic else ["das_length"])]
    manager.generate_sequences({"raw_prompt": [["q"]], "validate": True})
    assert len(calls) == 3


def test_the_client_can_be_copied_and_pickled():
    tagging = agent_loop.TaggingClient(Client())
    for again in (copy.deepcopy(tagging), pickle.loads(pickle.dumps(tagging))):
        assert again.tokenizer == "inner"


def test_fingerprints_are_stable_across_objects():
    class Image:
        pass

    def prompt(text: str = "what?") -> np.ndarray:
        return np.array([{"role": "user", "content": [{"image": Image(), "text": text}]}], dtype=object)

    assert agent_loop.fingerprint(prompt()) == agent_loop.fingerprint(list(prompt()))
    assert agent_loop.fingerprint(prompt()) != agent_loop.fingerprint(prompt("why?"))


@pytest.fixture
def worker(monkeypatch) -> Any:
    """An agent-loop worker without verl's start-up, whose two agent loops each make a request and end."""
    calls: list[tuple[Any, ...]] = []

    class Remote:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *args: calls.append((name, *args)))

    bare = agent_loop.AgentLoopWorker.__new__(agent_loop.AgentLoopWorker)
    bare._scheduler, bare._prompt_tail, bare.calls = Remote(), 0, calls
    bare.llm_client = agent_loop.TaggingClient(Client())

    async def run_prompt(self: Any, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        loops = [self._run_agent_loop(sampling_params, trajectory, **prompt) for _ in range(2)]
        results = await asyncio.gather(*map(asyncio.create_task, loops), return_exceptions=True)
        assert not [r for r in results if isinstance(r, AssertionError)]
        assert set(prompt) <= {
            "raw_prompt",
            "global_steps",
            "aborts",
        }  # goes on to the agent loop, and into verl's data

    async def run_loop(self: Any, sampling_params: dict, trajectory: dict, **kwargs: Any) -> None:
        await self.llm_client.generate("id", prompt_ids=[1, 2], sampling_params={})
        if kwargs.get("aborts"):
            raise RuntimeError("aborted")
        fields = {"max_global_steps": 3}
        output = SimpleNamespace(
            prompt_ids=[1, 2], response_ids=[7, 8], response_mask=[0, 1], extra_fields=fields, reward_score=0.5
        )
        await self._compute_score([output], kwargs)

    async def score(self: Any, outputs: list[Any], kwargs: dict) -> None:
        pass

    for name, stand_in in (("_run_prompt", run_prompt), ("_run_agent_loop", run_loop), ("_compute_score", score)):
        monkeypatch.setattr(agent_loop._AgentLoopWorkerTQ, name, stand_in)
    return bare


def test_each_trajectory_is_reported_once_and_its_prompt_when_all_have_ended(worker):
    prompt = {"raw_prompt": [{"content": "?"}], "global_steps": 4, "das_length": np.int64(12)}
    asyncio.run(worker._run_prompt(prompt, {}, {"validate": False}))
    name, key = agent_loop.fingerprint(prompt["raw_prompt"]), prompt_key([1, 2])
    assert [call[:3] for call in worker.calls] == [("report", name, key)] * 2 + [("finished", name, [key])]
    assert worker.llm_client._client.priorities == [-12, -12]
    reported = worker.calls[0][4]
    assert (reported.step, reported.version, reported.reward) == (4, 3, 0.5)
    assert [s.tolist() for s in reported.sequences(9)] == [[7, 8]]


def test_an_aborted_prompt_is_finished_and_validation_is_nobodys_business(worker):
    prompt = {"raw_prompt": [{"content": "?"}]}
    asyncio.run(worker._run_prompt(prompt | {"aborts": True}, {}, {"validate": False}))
    assert [call[0] for call in worker.calls] == ["finished"]
    worker.calls.clear()
    asyncio.run(worker._run_prompt(prompt, {}, {"validate": True}))
    assert worker.calls == []


def server(node_rank: int) -> Any:
    """A Server without verl's start-up, whose engine and scheduler record what they are asked."""
    bare = Server.__new__(Server)
    bare.node_rank = node_rank
    bare.asked = []
    bare.config = SimpleNamespace(engine_kwargs={"vllm": {}}, free_cache_engine=False)

    async def collective_rpc(method: str, args: tuple = ()) -> list[Any]:
        bare.asked.append((method, *args))
        return ["first rank's", "second rank's"]

    bare.engine = SimpleNamespace(collective_rpc=collective_rpc, errored=False)
    return bare


def test_the_server_passes_updates_on_and_tells_when_the_rollout_is_over():
    async def run() -> None:
        rollout = server(0)
        await rollout.sleep()  # before anyone has connected
        over = SimpleNamespace(rollout_over=SimpleNamespace(remote=lambda: rollout.asked.append("over")))
        await rollout.das_connect(over)
        await rollout.das_update({"keys": []}, ["a"])
        assert await rollout.das_counts() == "first rank's"
        await rollout.sleep()
        assert rollout.asked == [("das_update", {"keys": []}, ["a"]), ("das_counts",), "over"]

    asyncio.run(run())


def test_a_server_whose_engine_died_ends_the_run_instead_of_sleeping():
    rollout = server(0)
    rollout.engine.errored = True
    with pytest.raises(RuntimeError, match="engine of a rollout server has died"):
        asyncio.run(rollout.sleep())
