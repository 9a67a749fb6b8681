"""History beside verl's checkpoints, and history from its rollout dumps; verl's trainer is a stand-in here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from das_verl.history import Trajectory, TrajectoryWindow, snapshot, text_hash
from das_verl.verl import checkpoint, look_ahead
from das_verl.verl.checkpoint import FILE, SaveHistory, newest_snapshot, snapshot_to_resume
from das_verl.verl.warm_start import read_warm_start


def saved(response: int = 7) -> bytes:
    window = TrajectoryWindow(2, 10**6)
    window.add("key", Trajectory.of([1], [response]))
    return snapshot.dump(window, {})


@pytest.fixture
def trainer(monkeypatch) -> Any:
    monkeypatch.setattr(checkpoint.ray, "get", lambda x, timeout=None: x)
    scheduler = SimpleNamespace(save=SimpleNamespace(remote=saved))
    return SimpleNamespace(agent_loop_manager=SimpleNamespace(scheduler=scheduler))


@pytest.fixture
def callback(monkeypatch) -> SaveHistory:
    monkeypatch.setattr(look_ahead, "install", lambda: None)
    return SaveHistory(config=None)


def test_history_is_saved_with_the_checkpoint(callback, trainer, tmp_path):
    callback.on_save(trainer=trainer, global_step=3, checkpoint_dir=str(tmp_path / "global_step_3"), async_save=False)
    assert [p.name for p in (tmp_path / "global_step_3").iterdir()] == [FILE]
    assert (tmp_path / "global_step_3" / FILE).read_bytes() == saved()


def test_a_scheduler_that_had_died_is_restored_before_it_is_saved(callback, trainer, tmp_path):
    answers = [None, saved()]
    trainer.agent_loop_manager.scheduler.save.remote = lambda: answers.pop(0)
    trainer.agent_loop_manager.restore_scheduler = lambda: answers.append("restored")
    callback.on_save(trainer=trainer, global_step=3, checkpoint_dir=str(tmp_path))
    assert (tmp_path / FILE).read_bytes() == saved()
    assert answers == ["restored"]


def test_a_full_disk_does_not_end_the_run(callback, trainer, tmp_path, monkeypatch, log):
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.snapshot, "write", full)
    callback.on_save(trainer=trainer, global_step=3, checkpoint_dir=str(tmp_path))
    (message,) = log.messages
    assert "No space left on device" in message
    assert FILE in message


def config(folder: Path, mode: str = "auto", path: Path | None = None) -> Any:
    trainer = {"default_local_dir": str(folder), "resume_mode": mode, "resume_from_path": path and str(path)}
    return OmegaConf.create({"trainer": trainer})


def test_a_run_resumes_from_the_checkpoint_that_verl_resumes_from(tmp_path):
    assert snapshot_to_resume(config(tmp_path)) is newest_snapshot(config(tmp_path)) is None
    for step in (1, 2):
        snapshot.write(tmp_path / f"global_step_{step}" / FILE, saved(step))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    first, second = (tmp_path / f"global_step_{step}" / FILE for step in (1, 2))
    assert snapshot_to_resume(config(tmp_path)) == second
    assert snapshot_to_resume(config(tmp_path, "disable")) is None
    assert snapshot_to_resume(config(tmp_path, "resume_path", first.parent)) == first
    assert newest_snapshot(config(tmp_path, "disable")) == second
    second.unlink()
    assert snapshot_to_resume(config(tmp_path)) is None
    assert newest_snapshot(config(tmp_path)) == first


class Tokenizer:
    """A token a character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def test_a_warm_start_is_the_newest_rollouts_of_each_prompt(tmp_path, log):
    for step in range(1, 4):
        lines = [json.dumps({"input": "Q", "output": f"{step}{i}", "score": 0.5, "step": step}) for i in range(2)]
        (tmp_path / f"{step}.jsonl").write_text("\n".join([*lines, '{"input"']))
    read = read_warm_start(tmp_path, Tokenizer(), window=3)
    assert list(read) == [text_hash("Q")]
    assert [bytes(t.tokens.tolist()).decode() for t in read[text_hash("Q")]] == ["21", "30", "31"]
    assert [(t.step, t.reward) for t in read[text_hash("Q")]] == [(2, 0.5), (3, 0.5), (3, 0.5)]
    assert len(log.messages) == 3
    assert f"{tmp_path}/1.jsonl:3: " in log.messages[0]
