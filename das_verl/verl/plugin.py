"""Entry point of group ``verl.plugins``: verl imports this module in every process, when it is imported."""

import os

from das_verl.verl.resolver import register_resolver

register_resolver()

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from das_verl.verl import cpu

    cpu.enable()
