"""The ``das-verl`` command: one module for each subcommand, imported when it is called."""

from __future__ import annotations

import typer

from das_verl.cli.versions import versions

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Lossless speculative rollouts for verl.")
app.command()(versions)


@app.callback()
def _group() -> None:
    """Keep ``das-verl`` a command with subcommands, however many there are."""


def main() -> None:
    """Run the command; the console script's entry point."""
    app()
