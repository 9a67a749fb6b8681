"""History in verl's checkpoints: saved with them, restored with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from das_verl.history import snapshot
from das_verl.verl import look_ahead

_log = logging.getLogger(__name__)
FILE = "das_history.npz"


class SaveHistory(CheckpointCallback):
    """verl's checkpoint callback; verl makes one before it makes its data loader."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        look_ahead.install()

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Write the history beside verl's own files; called by verl after it has saved those."""
        path = Path(checkpoint_dir) / FILE
        manager = trainer.agent_loop_manager
        try:
            saved = ray.get(manager.scheduler.save.remote())
            if saved is None:
                manager.restore_scheduler()
                saved = ray.get(manager.scheduler.save.remote())
            snapshot.write(path, saved)
        except (OSError, ray.exceptions.RayError) as error:
            # A run without it drafts less for an epoch; a run that stops here loses more.
            _log.warning("cannot write %s (%s); a run resumed from there starts without history", path, error)


def snapshot_to_resume(config: Any) -> Path | None:
    """Return the snapshot in the checkpoint that verl resumes from, None if there is none."""
    trainer = config.trainer
    folder = None
    if trainer.resume_mode == "auto":
        folder = find_latest_ckpt_path(str(Path(trainer.default_local_dir).absolute()))
    elif trainer.resume_mode == "resume_path":
        folder = trainer.resume_from_path
    path = Path(folder) / FILE if folder else None
    return path if path is not None and path.is_file() else None


def newest_snapshot(config: Any) -> Path | None:
    """Return the snapshot that was saved last, None if there is none."""
    saved = Path(config.trainer.default_local_dir).glob(f"global_step_*/{FILE}")
    return max(saved, key=lambda path: path.stat().st_mtime_ns, default=None)
