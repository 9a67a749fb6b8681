"""Rollout dumps as verl writes them (``trainer.rollout_data_dir``): one JSONL file a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rollout:
    """One line of a dump: texts without special tokens."""

    prompt: str
    response: str
    step: int
    score: float


def dump_files(path: Path) -> list[Path]:
    """Return the files of a dump, a file or a folder of them, in the order of their steps."""
    if path.is_file():
        return [path]
    return sorted(path.glob("*.jsonl"), key=lambda f: (not f.stem.isdigit(), int(f.stem) if f.stem.isdigit() else 0, f))


def read_dump(file: Path) -> Iterator[Rollout | str]:
    """Yield the rollouts of one file, and for each bad line what is wrong with it, naming file and line.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                texts = entry["input"], entry["output"]
                if not all(isinstance(text, str) for text in texts):
                    raise TypeError("input and output must be texts")
                yield Rollout(*texts, int(entry.get("step", -1)), float(entry.get("score", "nan")))
            except KeyError as error:
                yield f"{file}:{number}: no field {error}"
            except (ValueError, TypeError, AttributeError) as error:
                yield f"{file}:{number}: {str(error).splitlines()[0]}"
