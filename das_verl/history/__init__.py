"""What the policy generated lately, per prompt: keys and the trajectory window. Knows no framework."""

from das_verl.history.window import TrajectoryWindow, prompt_key

__all__ = ["TrajectoryWindow", "prompt_key"]
