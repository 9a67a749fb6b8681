from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from das_verl.history.dumps import Rollout, dump_files, read_dump


def test_lines_come_back_and_bad_ones_are_named(tmp_path):
    file = tmp_path / "1.jsonl"
    good = {"input": "Q", "output": "A", "score": 1, "step": 1, "gts": None, "reward_extra": [1]}
    lines = [
        json.dumps(good),
        '{"input": "Q", "outp',
        json.dumps({"output": "A"}),
        "",
        json.dumps({"input": "Q", "output": None}),
        json.dumps({"input": "Q", "output": "A", "score": "high"}),
        "[1, 2]",
        '"text"',
        "\xff\x00\x01",
        json.dumps({"input": "R", "output": ""}),
    ]
    file.write_bytes("\n".join(lines).encode("latin-1"))
    got = list(read_dump(file))
    rollouts = [r for r in got if isinstance(r, Rollout)]
    assert rollouts[0] == Rollout("Q", "A", 1, 1.0)
    assert (rollouts[1].prompt, rollouts[1].response, rollouts[1].step) == ("R", "", -1)
    assert math.isnan(rollouts[1].score)
    bad = [r for r in got if isinstance(r, str)]
    assert [line.split(": ")[0] for line in bad] == [f"{file}:{n}" for n in (2, 3, 5, 6, 7, 8, 9)]
    assert "no field 'input'" in bad[1]
    assert all("\n" not in line for line in bad)


@pytest.mark.parametrize("names", [["10.jsonl", "2.jsonl", "extra.jsonl", "1.jsonl", "notes.txt"]])
def test_files_come_in_the_order_of_their_steps(tmp_path: Path, names):
    for name in names:
        (tmp_path / name).touch()
    assert [f.name for f in dump_files(tmp_path)] == ["1.jsonl", "2.jsonl", "10.jsonl", "extra.jsonl"]
    assert dump_files(tmp_path / "2.jsonl") == [tmp_path / "2.jsonl"]
    assert dump_files(tmp_path / "none") == []
