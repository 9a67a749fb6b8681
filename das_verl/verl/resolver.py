"""The OmegaConf resolver that the files in ``configs/`` use."""

from pathlib import Path

from omegaconf import OmegaConf


def register_resolver() -> None:
    """Register ``${das_file:NAME}``: the absolute path of a file that lies beside this module."""
    OmegaConf.register_new_resolver("das_file", lambda name: str(Path(__file__).parent / name), replace=True)
