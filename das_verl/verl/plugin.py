"""Entry point of group ``verl.plugins``: verl imports this module in every process, when it is imported."""

import logging
import os
import sys

from das_verl.verl.resolver import register_resolver


def show_log() -> None:
    """Let das-verl's messages through to stderr.

    Not by way of the root logger: one of vLLM's dependencies (model_hosting_container_standards, logging_config.py)
    mutes that for anything below an error as soon as vLLM's server is imported.
    """
    log = logging.getLogger("das_verl")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s das-verl: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


show_log()
register_resolver()

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from das_verl.verl import cpu

    cpu.enable()
