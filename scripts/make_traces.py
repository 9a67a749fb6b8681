#!/usr/bin/env python3
"""Make scripts/data/quickstart_rollouts.jsonl.gz, the rollouts that bench_drafter.py replays by default.

    python scripts/make_traces.py [OUT]

Trains the quickstart's pocket policy with DAS off for three epochs (about 8 minutes on 2 cores) and keeps what
verl dumps of each step in OUT/rollouts (default outputs/traces). Dumps that are there already are used as they are.
A row is one response: problem_id, policy_step (the epoch), sample, response.
"""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

from das_verl.history.dumps import read_dump

HERE = Path(__file__).resolve().parent
TARGET = HERE / "data" / "quickstart_rollouts.jsonl.gz"
EPOCHS = 3


def dump(out):
    """Train, and return the dumps of the steps, in order."""
    sys.path.insert(0, str(HERE.parent / "recipes" / "quickstart"))
    import make_data
    import run

    steps = EPOCHS * run.STEPS_PER_EPOCH
    files = [out / "rollouts" / f"{step + 1}.jsonl" for step in range(steps)]
    if not files[-1].exists():
        make_data.write(out / "data", train=run.PROMPTS, val=run.BATCH, seed=0)
        run.train("off", run.command(out, "off", steps, 1, [f"trainer.rollout_data_dir={out}/rollouts"]), out)
    return files


def rows(files):
    """Yield the rows of the shipped file: problems by first appearance, epochs by how often they were seen."""
    problems: dict[str, int] = {}
    epochs: Counter[int] = Counter()
    for file in files:
        samples: Counter[int] = Counter()
        for rollout in read_dump(file):
            if isinstance(rollout, str):
                raise SystemExit(f"make_traces: {rollout}")
            problem = problems.setdefault(rollout.prompt, len(problems))
            epochs[problem] += samples[problem] == 0
            yield {
                "problem_id": problem,
                "policy_step": epochs[problem],
                "sample": samples[problem],
                "response": rollout.response,
            }
            samples[problem] += 1


def main():
    """Write the file, the same bytes for the same dumps."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/traces").resolve()
    text = "".join(json.dumps(row) + "\n" for row in rows(dump(out)))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"Wrote {TARGET}: {text.count(chr(10))} rollouts, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
