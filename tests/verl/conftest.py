"""Real trainings with verl's own command, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes/quickstart"
# The quickstart's policy and task, small.
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
    "trainer.total_epochs=99",
]


class Training:
    """A running ``main_ppo``, which reads its data from ``data`` and writes everything else to ``out``."""

    def __init__(self, data: Path, out: Path, *overrides: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._metrics = out / f"metrics-{time.monotonic_ns()}.jsonl"
        self._log = self._metrics.with_suffix(".log")
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo", "+platform=cpu", "algorithm.adv_estimator=grpo"),
            f"data.train_files={data}/train.parquet",
            f"data.val_files={data}/val.parquet",
            "data.shuffle=false",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            f"trainer.default_local_dir={out}/checkpoints",
            "trainer.val_before_train=false",
            "trainer.logger=[file]",
            f"hydra.run.dir={out}/hydra",
            *overrides,
        ]
        env = os.environ | {"VERL_FILE_LOGGER_PATH": str(self._metrics), "VLLM_LOGGING_LEVEL": "WARNING"}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def steps(self) -> list[dict[str, float]]:
        """Return the metrics of each step logged so far."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be half written
            return [d for d in (json.loads(line)["data"] for line in lines) if "training/global_step" in d]
        return []

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged."""
        while not any(s["training/global_step"] >= step for s in self.steps()):
            assert self.process.poll() is None, self.log[-5000:]
            time.sleep(0.1)

    def finish(self) -> list[dict[str, float]]:
        """Wait for its good end and return the metrics of each step."""
        assert self.process.wait() == 0, self.log[-5000:]
        # The driver owns the engines: rollouts still under way when it ends, for a step that never comes, lose theirs.
        errors = [error for error in self.log.split("Traceback")[1:] if "its owner has died" not in error]
        assert not errors, errors[0][-5000:]
        return self.steps()

    def children(self) -> list[psutil.Process]:
        """Return its processes, Ray's actors and vLLM's among them."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self, name: str) -> None:
        """``kill -9`` the one process whose command line contains ``name``."""
        (process,) = [p for p in self.children() if name in " ".join(p.cmdline())]
        process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """Kill whatever is left of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [*self.children(), psutil.Process(self.process.pid)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=60)


@pytest.fixture
def start_training() -> Iterator[Callable[..., Training]]:
    """Return a function that starts a :class:`Training`."""
    started: list[Training] = []

    def start(data: Path, out: Path, *overrides: str) -> Training:
        started.append(Training(data, out, *overrides))
        return started[-1]

    yield start
    for training in started:
        training.stop()


@pytest.fixture(scope="session")
def run_without_das(pocket_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], Path]:
    """The metrics of one step without the flag, and verl's dumps of its rollouts."""
    out = tmp_path_factory.mktemp("without")
    once = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    training = Training(pocket_data, out, *POCKET, *once, f"trainer.rollout_data_dir={out}/dumps")
    try:
        (step,) = training.finish()
    finally:
        training.stop()
    return step, out / "dumps"


@pytest.fixture(scope="session")
def pocket() -> list[str]:
    """The overrides that train the quickstart's policy in short steps."""
    return POCKET


@pytest.fixture(scope="session")
def pocket_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight prompts of the quickstart's task to train on; the first four of them are for validation too."""
    import pandas as pd

    out = tmp_path_factory.mktemp("pocket")
    command = [sys.executable, str(QUICKSTART / "make_data.py"), "--out", str(out), "--train", "8", "--val", "4"]
    subprocess.run(command, check=True)
    pd.read_parquet(out / "train.parquet").head(4).to_parquet(out / "val.parquet")
    return out
