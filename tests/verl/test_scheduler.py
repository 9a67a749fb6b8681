"""What the scheduler, the server and the agent loop hand each other; Ray, engine and client are stand-ins here."""

from __future__ import annotations

import asyncio
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from das_verl.history import prompt_key
from das_verl.verl import agent_loop, metrics, scheduler
from das_verl.verl.server import Server
from das_verl.vllm.worker import unpack_history

COUNTS = {
    "requests": [[8, 6, 2], [0, 0, 0]],
    "with_history": 1,
    "draft_s": 0.5,
    "build_s": 0.25,
    "tree_bytes": 100,
    "tokens": 30,
    "steps": 20,
}


class FakeServer:
    """A rollout server's Ray handle: records what the scheduler sends."""

    def __init__(self) -> None:
        self.begun: list[dict[str, list[np.ndarray]]] = []
        self.das_begin_step = SimpleNamespace(remote=lambda packed: self.begun.append(unpack_history(packed)))
        self.das_end_step = SimpleNamespace(remote=lambda: COUNTS)


@pytest.fixture
def servers(monkeypatch) -> dict[str, FakeServer]:
    monkeypatch.setattr(scheduler, "ray", SimpleNamespace(put=lambda x: x, get=lambda x: x))
    return {"a": FakeServer(), "b": FakeServer()}


@pytest.fixture
def sched(servers, das_section) -> scheduler.Scheduler:
    sched = scheduler.Scheduler(servers, {"router_class": "..."})
    sched.configure(das_section | {"window": 2, "prompt_tail": 2})
    return sched


def test_every_replica_gets_the_history_of_the_steps_prompts_alone(sched, servers):
    prompt = [5, 6, 7]
    for response in ([1], [2], [3]):
        sched.report("question", "key", prompt, response)
    sched.report("another", "other", [9], [4])
    sched.begin_step(["question", "question", "new"])
    for server in servers.values():
        (history,) = server.begun
        assert {k: [t.tolist() for t in ts] for k, ts in history.items()} == {"key": [[6, 7, 2], [6, 7, 3]]}


def test_a_step_without_history_begins_too(sched, servers):
    sched.begin_step(["new"])
    assert servers["a"].begun == [{}]


def test_replicas_that_come_later_are_told_too(sched, servers):
    late = FakeServer()
    sched.add_servers({"c": late})
    sched.remove_servers(["a"])
    sched.begin_step(["new"])
    assert (len(late.begun), len(servers["a"].begun)) == (1, 0)


def test_metrics_add_up_over_replicas(sched):
    sched.report("question", "key", [5], [1, 2])
    got = sched.end_step()
    assert got["rollout/spec_accept_rate"] == pytest.approx(0.375)  # mean of 6/8, 0, 6/8, 0
    assert got["rollout/spec_accept_length"] == pytest.approx(2.0)  # mean of 1 + 6/2, 0 twice
    assert got["das/draft_tokens"] == 16
    assert got["das/accept_rate"] == 0.75
    assert got["das/tokens_per_step"] == 4.0
    assert got["das/tokens_per_step_all"] == 1.5
    assert got["das/history_share"] == 0.5
    assert got["das/draft_s"] == 0.5
    assert got["das/history_bytes"] == 12


def test_metrics_of_a_step_without_requests_are_finite():
    got = metrics.summarise([COUNTS | {"requests": [], "tokens": 0, "steps": 0, "with_history": 0}])
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
    """verl's LLM client: records the sampling parameters that reach it."""

    tokenizer = "inner"

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        self.seen.append(sampling_params)


def test_all_requests_of_a_trajectory_carry_its_first_prompts_key():
    client = Client()
    tagging = agent_loop.TaggingClient(client)

    async def trajectory(prompt: list[int]) -> None:
        agent_loop._current.set(agent_loop.Trajectory("question"))
        params = {"temperature": 1.0, "extra_args": {"mine": 1}}
        await tagging.generate("id", prompt_ids=prompt, sampling_params=params)
        # A later turn, or the same request resumed after an abort.
        await tagging.generate("id", prompt_ids=[*prompt, 8, 9], sampling_params=params)
        assert params == {"temperature": 1.0, "extra_args": {"mine": 1}}

    async def run() -> None:
        await asyncio.gather(*(asyncio.create_task(trajectory(p)) for p in ([1], [2])))
        # Outside of a training trajectory nothing is added.
        await tagging.generate("id", prompt_ids=[1], sampling_params={"temperature": 0.0})

    asyncio.run(run())
    assert sorted(s["extra_args"]["das"] for s in client.seen[:4]) == sorted([prompt_key([1]), prompt_key([2])] * 2)
    assert client.seen[0]["extra_args"]["mine"] == 1
    assert client.seen[4] == {"temperature": 0.0}


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


def server(node_rank: int, das: bool) -> Any:
    """A Server without verl's start-up, whose engine counts how often a step ended."""
    bare = Server.__new__(Server)
    bare.node_rank = node_rank
    additional = {"additional_config": {"das": {}}} if das else {}
    bare.config = SimpleNamespace(engine_kwargs={"vllm": additional}, free_cache_engine=False)
    if node_rank == 0:
        ended: list[str] = []

        async def collective_rpc(method: str, args: tuple = ()) -> list[Any]:
            ended.append(method)
            return [len(ended)]

        bare.engine = SimpleNamespace(collective_rpc=collective_rpc, ended=ended)
    return bare


def test_sleep_releases_the_trees_once_and_keeps_the_counts():
    async def run() -> None:
        rollout = server(0, das=True)
        await rollout.das_begin_step({})
        await rollout.sleep()
        await rollout.sleep()
        assert rollout.engine.ended == ["das_begin_step", "das_end_step"]
        assert await rollout.das_end_step() == 2
        # Asked again without a step in between: new counts, not the old ones.
        assert await rollout.das_end_step() == 3

    asyncio.run(run())


@pytest.mark.parametrize(("node_rank", "das"), [(1, True), (0, False)])
def test_other_nodes_and_runs_without_das_sleep_as_verl_does(node_rank, das):
    rollout = server(node_rank, das)
    asyncio.run(rollout.sleep())
    assert node_rank == 1 or rollout.engine.ended == []
