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
        try:
            snapshot.write(path, ray.get(trainer.agent_loop_manager.scheduler.save.remote()))
        except (OSError, ray.exceptions.RayError) as error:
            # A run without it drafts less for an epoch; a run that stops here loses more.
            _log.warning("cannot write %s (%s); a run resumed from there starts without history", path, error)


def latest_snapshot(config: Any, *, of_this_run: bool = False) -> Path | None:
    """Return the snapshot in the checkpoint that verl resumes from, None if there is none.

    Parameters
    ----------
    config : DictConfig
        The whole config.
    of_this_run : bool
        Look for the newest checkpoint instead, whatever the run was told to resume from.
    """
    trainer = config.trainer
    mode = "auto" if of_this_run else trainer.resume_mode
    if mode == "disable":
        return None
    folder = trainer.resume_from_path if mode == "resume_path" else None
    if mode == "auto":
        folder = find_latest_ckpt_path(str(Path(trainer.default_local_dir).absolute()))
    path = Path(folder) / FILE if folder else None
    return path if path is not None and path.is_file() else None
