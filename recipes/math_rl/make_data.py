"""Write GSM8K-style training prompts for verl, from reasoning-gym's ``gsm_symbolic``.

python recipes/math_rl/make_data.py --out outputs/gsm --prompts 32
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import reasoning_gym


def make_data(out: Path, prompts: int, seed: int) -> None:
    """Write ``train.parquet`` and ``val.parquet`` with ``prompts`` questions each to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for split, offset in (("train", 0), ("val", 1)):
        questions = reasoning_gym.create_dataset("gsm_symbolic", size=prompts, seed=seed + offset)
        rows = [
            {
                "data_source": "gsm_symbolic",
                "prompt": [{"role": "user", "content": q["question"] + "\nEnd with '#### ' and the answer."}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(q["answer"])},
                "extra_info": {"index": i, "split": split},
            }
            for i, q in enumerate(questions)
        ]
        pd.DataFrame(rows).to_parquet(out / f"{split}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/gsm"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_data(args.out, args.prompts, args.seed)
