"""Write the quickstart's prompts as verl's parquet files.

Usage: python recipes/quickstart/make_data.py --out DIR [--train 96] [--val 64] [--seed 0]
"""

import argparse
from itertools import islice
from pathlib import Path

import pandas as pd
import task


def write(out: Path, train: int, val: int, seed: int) -> None:
    """
    Write ``train.parquet`` and ``val.parquet``, with no prompt in common.

    Parameters
    ----------
    out : pathlib.Path
        Folder, made if missing.
    train, val : int
        Numbers of prompts.
    seed : int
        Seed of the prompts.
    """
    out.mkdir(parents=True, exist_ok=True)
    entries = task.problems(seed, distinct=True)
    for split, count in (("train", train), ("val", val)):
        rows = (
            {
                "data_source": task.DATA_SOURCE,
                "prompt": [{"role": "user", "content": entry["question"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
                "extra_info": {"index": index, "split": split, "stratum": entry["stratum"]},
            }
            for index, entry in enumerate(islice(entries, count))
        )
        pd.DataFrame(rows).to_parquet(out / f"{split}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the quickstart's prompts as verl's parquet files.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=96)
    parser.add_argument("--val", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, args.train, args.val, args.seed)
