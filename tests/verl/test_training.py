"""verl's own trainer on a CPU, with and without the flag: GRPO end to end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]
QUICKSTART = ROOT / "recipes/quickstart"


def train(out: Path, *overrides: str) -> list[dict[str, float]]:
    """Run verl's trainer and return the metrics of each step it logged."""
    common = [
        "+platform=cpu",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={out}/train.parquet",
        f"data.val_files={out}/val.parquet",
        "data.shuffle=false",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        f"hydra.run.dir={out}/hydra",
    ]
    env = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": f"{out}/metrics.jsonl",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    result = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *common, *overrides],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert "Traceback" not in result.stdout, result.stdout[-5000:]
    return [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_sound(step: dict[str, float]) -> None:
    """The rollout's probabilities are the actor's: weights and logprobs went through speculation unharmed."""
    assert step["training/rollout_actor_probs_pearson_corr"] > 0.99
    assert all(math.isfinite(v) for v in step.values())


@pytest.fixture(scope="module")
def pocket_data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("pocket")
    command = [sys.executable, str(QUICKSTART / "make_data.py"), "--out", str(out), "--train", "8", "--val", "4"]
    subprocess.run(command, check=True)
    return out


POCKET = [
    f"actor_rollout_ref.model.path={QUICKSTART}/policy",
    f"reward.custom_reward_function.path={QUICKSTART}/task.py",
    "data.max_prompt_length=160",
    "data.max_response_length=256",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1280",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=416",
    "trainer.total_epochs=9",
    "trainer.total_training_steps=3",
]

VALIDATE = ["trainer.val_before_train=true", "trainer.test_freq=1", "actor_rollout_ref.rollout.agent.num_workers=2"]


def test_one_flag_drafts_from_the_previous_epochs(pocket_data):
    # Validation after every step, of a prompt that training has too: its rollouts must not enter history.
    pd.read_parquet(pocket_data / "train.parquet").head(4).to_parquet(pocket_data / "val.parquet")
    steps = [
        data
        for data in train(pocket_data, *POCKET, "+das=on", "das.verify_tokens=64", *VALIDATE)
        if "training/global_step" in data
    ]
    assert len(steps) == 3
    for n, step in enumerate(steps):
        check_sound(step)
        assert step["das/history_share"] == (1.0 if n else 0.0)
        assert step["das/history_trajectories"] == 32 * (n + 1)  # 8 prompts, 4 rollouts each
        assert 0 < step["rollout/spec_accept_rate"] <= 1
        assert step["rollout/spec_accept_length"] >= 1
        assert step["das/accepted_tokens"] <= step["das/draft_tokens"]
        assert step["das/tree_bytes"] > 0
        assert step["das/draft_s"] > 0
    assert steps[1]["das/build_s"] > 0
    assert steps[-1]["das/tokens_per_step"] > 1.5


def test_without_the_flag_nothing_of_das_runs(pocket_data):
    (step,) = train(pocket_data, *POCKET, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    check_sound(step)
    assert not [name for name in step if name.startswith(("das/", "rollout/spec"))]


def test_a_language_model_on_grade_school_math(tmp_path):
    recipe = ROOT / "recipes/math_rl"
    model = ROOT / "outputs/smollm2-135m"
    subprocess.run([sys.executable, str(recipe / "make_model.py"), "--out", str(model)], check=True)
    subprocess.run([sys.executable, str(recipe / "make_data.py"), "--out", str(tmp_path), "--prompts", "4"], check=True)
    steps = train(
        tmp_path,
        "+das=on",
        "das.verify_tokens=16",
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={recipe}/reward.py",
        "data.max_prompt_length=256",
        "data.max_response_length=96",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_model_len=352",
        "trainer.total_epochs=2",
    )
    assert len(steps) == 2
    for step in steps:
        check_sound(step)
    assert [step["das/history_share"] for step in steps] == [0.0, 1.0]
