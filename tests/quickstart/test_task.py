"""The quickstart's task, data and shipped policy."""

import importlib.util
import json
import re
import subprocess
import sys
from itertools import islice
from math import gcd
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("reasoning_gym")
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
POLICY = RECIPE / "policy"


def load(name: str):
    """Load a file of the recipe by its path, as verl does."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


task = load("task")


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def entries():
    return list(islice(task.problems(3, distinct=True), 160))


def score(text: str, answer: str) -> float:
    return task.compute_score(task.DATA_SOURCE, text, answer, extra_info={"index": 0})


def test_the_worked_solutions_are_right(entries):
    assert all(score(entry["solution"], entry["answer"]) == 1 for entry in entries)


@pytest.mark.parametrize("step", [-1, 1])
def test_one_slip_anywhere_loses_the_reward(entries, step):
    class Once(Random):
        def random(self):
            self.left -= 1
            return 0.0 if self.left == 0 else 1.0

        def choice(self, _):
            return step

    for entry in entries[:32]:
        a, b = entry["metadata"]["numbers"]
        for line in range(1, entry["solution"].count("=") + 1):
            rng = Once()
            rng.left = line
            assert score(task.solve(a, b, rng), entry["answer"]) == 0


@pytest.mark.parametrize("text", ["", "12", "GCD: ", "GCD: 12\n24-12=12", "GCD: -12", "GCD: 1 2", "GCD: 123"])
def test_a_malformed_response_scores_nothing(text):
    assert score(text, "12") == 0


def test_the_same_seed_gives_the_same_distinct_problems(entries):
    assert list(islice(task.problems(3, distinct=True), 160)) == entries
    assert len({frozenset(entry["metadata"]["numbers"]) for entry in entries}) == len(entries)
    assert all(int(entry["answer"]) == gcd(*entry["metadata"]["numbers"]) > 1 for entry in entries)


def test_every_cycle_holds_each_stratum_in_proportion(entries):
    for start in range(0, len(entries), task.CYCLE):
        names = [entry["stratum"] for entry in entries[start : start + task.CYCLE]]
        assert {s.name: names.count(s.name) for s in task.STRATA} == {s.name: s.share for s in task.STRATA}


def test_solution_lengths_have_a_long_tail(entries, tokenizer):
    lengths = sorted(len(tokenizer(entry["solution"])["input_ids"]) + 1 for entry in entries)
    median, p95 = lengths[len(lengths) // 2], lengths[int(0.95 * len(lengths))]
    assert 50 <= median <= 80
    assert p95 >= 8 * median
    assert 600 <= lengths[-1] <= 1024


def test_the_tokenizer_round_trips(entries, tokenizer):
    for text in [
        *(entry[key] for entry in entries[:20] for key in ("question", "solution")),
        "naïve → 7\n\n x",
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("1234") == list("1234")


def test_the_chat_template_ends_where_the_response_begins(tokenizer):
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>Hi<|assistant|>"
    chat.append({"role": "assistant", "content": "1"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{prompt}1{tokenizer.eos_token}"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_the_shipped_policy_is_small():
    assert sum(path.stat().st_size for path in POLICY.rglob("*")) < 15 * 2**20
    config = json.loads((POLICY / "config.json").read_text())
    assert config["max_position_embeddings"] >= 2048
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(POLICY / "model.safetensors", "np") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (no mapping)
    assert {part.get_dtype() for part in slices} == {"BF16"}
    assert sum(part.get_shape()[0] * [*part.get_shape(), 1][1] for part in slices) < 6e6


def test_the_data_has_the_columns_verl_reads(tmp_path):
    pandas = pytest.importorskip("pandas")
    command = [sys.executable, RECIPE / "make_data.py", "--out", tmp_path, "--train", "32", "--val", "16"]
    subprocess.run(command, check=True)
    frames = {split: pandas.read_parquet(tmp_path / f"{split}.parquet") for split in ("train", "val")}
    assert {split: len(frame) for split, frame in frames.items()} == {"train": 32, "val": 16}
    questions = [prompt[0]["content"] for frame in frames.values() for prompt in frame["prompt"]]
    assert len(set(questions)) == 48
    row = frames["val"].iloc[0]
    assert row["data_source"] == task.DATA_SOURCE
    assert row["prompt"][0]["role"] == "user"
    assert row["ability"] == "math"
    assert row["reward_model"]["style"] == "rule"
    numbers = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
    assert int(row["reward_model"]["ground_truth"]) == gcd(*numbers)
    assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (0, "val")
