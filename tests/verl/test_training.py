"""verl's own trainer on a CPU, with and without the flag: GRPO end to end."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]


def check_sound(step: dict[str, float]) -> None:
    """The rollout's probabilities are the actor's: weights and logprobs went through speculation unharmed."""
    assert step["training/rollout_actor_probs_pearson_corr"] > 0.99
    assert all(math.isfinite(v) for v in step.values())


def test_one_flag_drafts_from_the_previous_epochs(start_training, pocket, pocket_data, tmp_path):
    # Validation after every step, of prompts that training has too: its rollouts must not enter history.
    validate = ["trainer.val_before_train=true", "trainer.test_freq=1", "actor_rollout_ref.rollout.agent.num_workers=2"]
    das = ["+das=on", "das.verify_tokens=64", "trainer.total_training_steps=3", "trainer.save_freq=-1"]
    replicas = ["trainer.n_gpus_per_node=2"]
    steps = start_training(pocket_data, tmp_path, *pocket, *das, *validate, *replicas).finish()
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
        assert 1 <= step["das/finish_spread"] < 2
    assert steps[1]["das/build_s"] > 0
    assert steps[-1]["das/tokens_per_step"] > 1.5


def test_without_the_flag_nothing_of_das_runs(run_without_das):
    step, _ = run_without_das
    check_sound(step)
    assert not [name for name in step if name.startswith(("das/", "rollout/spec"))]


def test_a_language_model_on_grade_school_math(start_training, tmp_path):
    recipe = ROOT / "recipes/math_rl"
    model = ROOT / "outputs/smollm2-135m"
    subprocess.run([sys.executable, str(recipe / "make_model.py"), "--out", str(model)], check=True)
    subprocess.run([sys.executable, str(recipe / "make_data.py"), "--out", str(tmp_path), "--prompts", "4"], check=True)
    steps = start_training(
        tmp_path,
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
        "trainer.save_freq=-1",
    ).finish()
    assert len(steps) == 2
    for step in steps:
        check_sound(step)
    assert [step["das/history_share"] for step in steps] == [0.0, 1.0]


def test_rollouts_that_go_on_over_an_update(start_training, pocket, pocket_data, tmp_path):
    mode = ["trainer.v1.trainer_mode=colocate_async", "data.train_batch_size=4"]
    das = ["+das=on", "das.verify_tokens=64", "trainer.total_training_steps=4", "trainer.save_freq=-1"]
    mini = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.test_freq=-1"]
    steps = start_training(pocket_data, tmp_path, *pocket, *mode, *das, *mini).finish()
    assert len(steps) == 4
    for n, step in enumerate(steps):
        check_sound(step)
        # 4 prompts with 4 rollouts each were drawn for every step, and 4 more to begin with; none counts twice.
        assert 16 * (n + 1) <= step["das/history_trajectories"] <= 16 * (n + 2)
    # A step whose rollouts were all made during the one before has nothing left to draft.
    assert max(step["das/tokens_per_step_all"] for step in steps[1:]) > 1.2
