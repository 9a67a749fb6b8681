"""What past rollouts of each prompt were."""

from das_verl.history.snapshot import SnapshotError
from das_verl.history.window import Trajectory, TrajectoryWindow, prompt_key, text_hash

__all__ = ["SnapshotError", "Trajectory", "TrajectoryWindow", "prompt_key", "text_hash"]
