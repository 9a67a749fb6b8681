"""Real trainings whose processes are killed in the middle of a step, and what history is afterwards."""

from __future__ import annotations

import time

import pytest

from das_verl.history import TrajectoryWindow, snapshot
from das_verl.verl.checkpoint import FILE

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]
DAS = ["+das=on", "das.verify_tokens=64", "das.window=64", "trainer.test_freq=-1"]


def test_killed_in_the_middle_of_a_step(start_training, pocket, pocket_data, tmp_path):
    def start():
        return start_training(
            pocket_data, tmp_path, *pocket, *DAS, "trainer.save_freq=2", "trainer.total_training_steps=20"
        )

    first = start()
    first.wait_for_step(3)
    time.sleep(1)
    first.stop()

    saved = TrajectoryWindow(64, 10**9)
    snapshot.load((tmp_path / "checkpoints/global_step_2" / FILE).read_bytes(), saved)
    assert len(saved) == 64  # two steps of 8 prompts, 4 rollouts each
    assert {t.step for _, t in saved} == {1, 2}

    resumed = start()
    resumed.wait_for_step(3)
    assert "history restored from" in resumed.log
    step = resumed.steps()[0]
    # As if it had not been interrupted: all prompts have history, and no rollout counts twice.
    assert (step["training/global_step"], step["das/history_share"], step["das/history_trajectories"]) == (3, 1.0, 96)

    resumed.kill("ray::Scheduler")
    resumed.wait_for_step(6)
    assert resumed.log.count("the scheduler had died") == 1
    step = resumed.steps()[-1]
    assert step["das/history_trajectories"] >= 64 + 32
    assert step["das/accepted_tokens"] > 0

    resumed.kill("VLLM::EngineCore")
    assert resumed.process.wait(timeout=300) != 0
    assert "EngineDeadError" in resumed.log
    # Ours, or verl's own where no rollout at all was finished.
    assert "engine of a rollout server has died" in resumed.log or "failed groups" in resumed.log


def test_rollout_dumps_of_another_run_are_history(start_training, pocket, pocket_data, run_without_das, tmp_path):
    _, dumps = run_without_das
    short = ["trainer.total_training_steps=1", "trainer.save_freq=-1"]
    warm = [*DAS, f"das.history.warm_start={dumps}"]
    (step,) = start_training(pocket_data, tmp_path, *pocket, *short, *warm).finish()
    assert step["das/history_trajectories"] == 2 * 32
    assert step["das/build_s"] > 0
    assert step["das/tokens_per_step"] > 1.5
