"""The proposer's bookkeeping, with a stand-in for vLLM's model runner; test_distribution.py has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from das_verl.config import ConfigError
from das_verl.vllm.proposer import Proposer
from das_verl.vllm.worker import pack_history, unpack_history

MODEL_LEN = 200
PROMPT = [7, 8, 9]
STORY = list(range(20, 120))


class Runner:
    """The part of vLLM's model runner that the proposer reads, and a batch of rows to feed it."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, Any] = {}
        self.text: dict[str, list[int]] = {}
        self.query_start_loc = SimpleNamespace(np=np.zeros(65, np.int32))
        proposer.attach(self)

    def add(self, name: str, prompt: list[int] = PROMPT, tag: str | None = "k", max_tokens: int = 100) -> None:
        params = SimpleNamespace(
            extra_args=None if tag is None else {"das": tag}, max_tokens=max_tokens, temperature=1.0
        )
        self.requests[name] = SimpleNamespace(sampling_params=params, num_prompt_tokens=len(prompt))
        self.text[name] = list(prompt)
        self.input_batch.req_ids.append(name)

    def finish(self, name: str) -> None:
        self.input_batch.req_ids.remove(name)
        del self.requests[name], self.text[name]

    def step(self, sampled: dict[str, list[int]]) -> dict[str, list[int]]:
        """One engine step: append each row's verified tokens, then propose."""
        names = self.input_batch.req_ids
        table = np.full((len(names), MODEL_LEN), -1, np.int32)
        for row, name in enumerate(names):
            self.text[name] += sampled.get(name, [])
            table[row, : len(self.text[name])] = self.text[name]
        lengths = np.array([len(self.text[n]) for n in names], np.int32)
        drafts = self.proposer.propose([sampled.get(n, []) for n in names], lengths, table)
        assert len(drafts) == len(names)
        return dict(zip(names, drafts, strict=True))


@pytest.fixture
def make_proposer(das_section):
    def make(**das: Any) -> Proposer:
        das = das_section | {"verify_tokens": 100_000, "tree_gb": 0.1} | das
        return Proposer(
            SimpleNamespace(
                additional_config={"das": das},
                speculative_config=SimpleNamespace(num_speculative_tokens=das["max_draft"]),
                model_config=SimpleNamespace(max_model_len=MODEL_LEN),
                scheduler_config=SimpleNamespace(max_num_seqs=64),
            )
        )

    return make


@pytest.fixture
def runner(make_proposer) -> Runner:
    runner = Runner(make_proposer(max_draft=4))
    begin(runner)
    return runner


def begin(runner: Runner, history: Any = None) -> None:
    runner.proposer.update(history or {"k": [np.array(PROMPT + STORY, np.int32)]}, None)
    assert runner.proposer._store.wait(10)


def test_drafts_follow_history_from_the_first_token_on(runner):
    runner.add("a")
    assert runner.step({"a": STORY[:1]})["a"] == STORY[1:5]


def test_no_section_is_an_error():
    with pytest.raises(ConfigError, match="missing"):
        Proposer(SimpleNamespace(additional_config={}))


def test_nothing_is_drafted_before_attach(make_proposer):
    assert make_proposer().propose([[1], []], np.array([2, 3]), np.zeros((2, 9), np.int32)) == [[], []]


def test_untagged_requests_and_unfinished_prompts_get_no_draft(runner):
    runner.add("tagged")
    runner.add("untagged", tag=None)
    runner.add("prefill")
    drafts = runner.step({"tagged": STORY[:1], "untagged": STORY[:1]})
    assert drafts == {"tagged": STORY[1:5], "untagged": [], "prefill": []}
    sampled = {"tagged": STORY[1:2], "untagged": [5], "prefill": STORY[:1]}
    assert runner.step(sampled)["prefill"] == STORY[1:5]


def test_rows_may_move_between_steps(runner):
    for name in "abc":
        runner.add(name)
    runner.step(dict.fromkeys("abc", STORY[:1]))
    runner.input_batch.req_ids.reverse()
    drafts = runner.step({"a": STORY[1:2], "b": STORY[1:3], "c": STORY[1:4]})
    assert drafts == {"a": STORY[2:6], "b": STORY[3:7], "c": STORY[4:8]}


def test_a_row_reused_by_another_request_starts_afresh(runner):
    runner.add("a")
    runner.step({"a": STORY[:1]})
    runner.finish("a")
    runner.add("b")
    assert runner.step({"b": STORY[50:51]})["b"] == STORY[51:55]
    assert len(runner.proposer._requests) == 1


def test_a_preempted_request_comes_back_with_what_it_had(runner):
    runner.add("a")
    runner.add("b")
    runner.step({"a": STORY[:1], "b": STORY[:1]})
    runner.input_batch.req_ids.remove("a")
    runner.step({"b": STORY[1:2]})
    runner.input_batch.req_ids.append("a")
    runner.text["a"] += STORY[1:3]
    assert runner.step({"a": STORY[3:4], "b": [5]})["a"] == STORY[4:8]


def test_drafts_end_with_the_request_and_the_context(runner):
    runner.add("a", max_tokens=3)
    # Two tokens are left: one drafted, and the one that verification adds.
    assert runner.step({"a": STORY[:1]})["a"] == STORY[1:2]
    assert runner.step({"a": STORY[1:2]})["a"] == []
    runner.add("b", prompt=[1] * (MODEL_LEN - 3), max_tokens=100)
    assert len(runner.step({"b": STORY[:1]})["b"]) <= 1


def test_siblings_learn_from_each_other_within_the_step(runner):
    begin(runner, {"other": [np.array([1, 2], np.int32)]})
    runner.add("a")
    runner.add("b")
    runner.step({"a": STORY[:30]})
    assert runner.step({"b": STORY[10:12]})["b"] == STORY[12:16]


def test_many_running_requests_draft_nothing_and_their_tokens_are_not_lost(make_proposer):
    runner = Runner(make_proposer(max_draft=4, verify_tokens=1))
    begin(runner)
    for name in "abcd":
        runner.add(name)
    for i in range(40):
        assert runner.step({n: [STORY[i] + 1000] for n in "abcd"}) == {n: [] for n in "abcd"}
    for name in "bcd":
        runner.finish(name)
    # Alone, it may draft, from what its finished siblings said.
    assert runner.step({"a": [STORY[10] + 1000]})["a"] == [STORY[11] + 1000, STORY[12] + 1000, STORY[13] + 1000]


def test_a_placeholder_is_not_a_token(runner):
    runner.add("a")
    runner.step({"a": STORY[:1]})
    assert runner.step({"a": [-1]})["a"] == []
    runner.text["a"][-1] = STORY[1]
    assert runner.step({"a": STORY[2:3]})["a"] == STORY[3:7]


def test_counts_tell_drafted_accepted_and_verified(runner):
    runner.add("a")
    runner.step({"a": STORY[:1]})
    runner.step({"a": [*STORY[1:4], 5]})  # three of four accepted
    runner.add("untouched", tag=None)
    counts = runner.proposer.counts()
    assert counts["requests"] == [[4, 3, 1]]
    assert counts["tokens"] == 5
    assert counts["steps"] == 2
    assert (counts["with_history"], counts["opened"]) == (1, 1)
    assert counts["tree_bytes"] > 0
    runner.proposer.update({}, ["k"])
    assert runner.proposer.counts()["requests"] == []
    empty = runner.proposer.counts()
    assert empty["requests"] == []
    assert empty["tree_bytes"] == empty["tokens"] == empty["opened"] == 0


def test_classes_draft_by_expected_length(make_proposer):
    proposer = make_proposer(
        max_draft=8,
        policy="classes",
        verify_tokens=1,
        classes={"medium": 20, "long": 60, "medium_draft": 3, "long_draft": 8},
    )
    runner = Runner(proposer)
    texts = {"short": STORY[:10], "medium": STORY[:40], "long": STORY[:90]}
    begin(runner, {k: [np.array(PROMPT + t, np.int32)] * 3 for k, t in texts.items()})
    for name in texts:
        runner.add(name, tag=name)
    drafts = runner.step(dict.fromkeys(texts, STORY[:1]))
    assert drafts == {"short": [], "medium": STORY[1:4], "long": STORY[1:9]}


def test_a_short_one_that_goes_on_becomes_a_long_one(make_proposer):
    classes = {"medium": 20, "long": 60, "medium_draft": 3, "long_draft": 8}
    runner = Runner(make_proposer(max_draft=8, policy="classes", classes=classes))
    begin(runner, {"k": [np.array(PROMPT + STORY[:10], np.int32)] * 3})
    runner.add("a")
    lengths = [len(runner.step({"a": [STORY[i % 10]]})["a"]) for i in range(90)]
    assert lengths[0] == 0
    assert lengths[40] == 3
    assert lengths[85] == 8


def test_drafts_have_the_sizes_that_were_asked_for(make_proposer):
    runner = Runner(make_proposer(max_draft=8, draft_sizes=[1, 3, 7]))
    begin(runner)
    runner.add("a")
    runner.add("b", max_tokens=7)
    runner.add("c", max_tokens=4)
    drafts = runner.step(dict.fromkeys("abc", STORY[:1]))
    assert [len(d) for d in drafts.values()] == [7, 3, 1]


def test_only_the_first_tensor_parallel_rank_drafts(make_proposer):
    proposer = make_proposer()
    runner = Runner(proposer)
    other = make_proposer()
    other.attach(runner, tensor_parallel_rank=1)
    other.update({"k": [np.array(PROMPT + STORY, np.int32)]}, None)
    assert other._store.stats().tree_bytes == 0
    assert other.propose([[1], []], np.array([2, 3]), np.zeros((2, 9), np.int32)) == [[], []]


def test_a_prompt_whose_history_is_no_guide_any_more_stops_drafting(make_proposer):
    runner = Runner(make_proposer(max_draft=4, verify_tokens=40))
    rng = np.random.default_rng(0)
    # History says one of two things after each token, the policy says neither.
    begin(runner, {"k": [np.array([*PROMPT, *STORY], np.int32)] * 2})
    for name in "abcd":
        runner.add(name, max_tokens=190)
    drafted = []
    for _ in range(180):
        said = {n: [STORY[int(rng.integers(0, 90))]] for n in "abcd"}
        drafted.append(sum(map(len, runner.step(said).values())))
    assert sum(drafted[:8]) > 0
    assert sum(drafted[-60:]) < 0.1 * 60 * drafted[0]


def test_two_proposers_fed_the_same_draft_the_same(make_proposer):
    def run() -> list[Any]:
        rng = np.random.default_rng(1)
        runner = Runner(make_proposer(max_draft=4))
        begin(runner, {"k": [rng.integers(0, 3, 50).astype(np.int32) for _ in range(4)]})
        for name in "abc":
            runner.add(name)
        return [runner.step({n: rng.integers(0, 3, 2).tolist() for n in "abc"}) for _ in range(15)]

    assert run() == run()


@settings(derandomize=True, deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4), max_size=4))
def test_packing_history_loses_nothing(history):
    arrays = {k: [np.array(t, np.int32) for t in ts] for k, ts in history.items()}
    got = unpack_history(pack_history(arrays))
    assert {k: [t.tolist() for t in ts] for k, ts in got.items()} == history
