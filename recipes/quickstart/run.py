"""The quickstart: the same GRPO training twice, DAS off and on, and what it made of the rollout time.

    python recipes/quickstart/run.py [--out DIR] [--steps N] [--seed N] [HYDRA_OVERRIDE ...]

Trains the pocket policy in this folder with verl's own trainer on a CPU. Prints a table per step and the totals;
writes ``results.json``, ``results.png`` and one log per run to DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import make_data
import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
PROMPTS = 80
BATCH = 16
STEPS_PER_EPOCH = PROMPTS // BATCH
RESPONSE_LENGTH = 1024
# Column of the results -> verl's metric.
FIGURES = {
    "rollout_s": "timing_s/gen",
    "step_s": "timing_s/step",
    "reward": "critic/score/mean",
    "length": "response_length/mean",
    "longest": "response_length/max",
    "tokens_per_step": "das/tokens_per_step",
    "tokens_per_step_all": "das/tokens_per_step_all",
    "draft_tokens": "das/draft_tokens",
    "accept_rate": "das/accept_rate",
    "history_share": "das/history_share",
    "draft_s": "das/draft_s",
    "build_s": "das/build_s",
    "tree_bytes": "das/tree_bytes",
    "verify_tokens": "das/verify_tokens",
}
console = Console()


def command(out: Path, das: str, steps: int, seed: int, overrides: list[str]) -> list[str]:
    """Return the training command: verl's own, with ``+das=on`` or without."""
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+platform=cpu"),
        *(["+das=on"] if das == "on" else []),
        "algorithm.adv_estimator=grpo",
        f"data.train_files={out}/data/train.parquet",
        f"data.val_files={out}/data/val.parquet",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=false",
        f"data.seed={seed}",
        "data.max_prompt_length=160",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"actor_rollout_ref.model.path={HERE / 'policy'}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1280",
        "actor_rollout_ref.rollout.temperature=1.0",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"actor_rollout_ref.rollout.max_model_len={160 + RESPONSE_LENGTH}",
        f"actor_rollout_ref.rollout.max_num_seqs={BATCH * 8}",
        f"reward.custom_reward_function.path={HERE / 'task.py'}",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'replay_buffer.py'}",
        "trainer.v1.sampler.custom_sampler.name=ResponsiveReplayBuffer",
        "trainer.total_epochs=1000",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[file]",
        f"hydra.run.dir={out}/hydra",
        *overrides,
    ]


def train(name: str, cmd: list[str], out: Path) -> list[dict[str, float]]:
    """Run one training, print each step as it ends, and return the steps' figures.

    Raises
    ------
    SystemExit
        When the training fails; the log says why.
    """
    metrics, log = out / f"{name}.jsonl", out / f"{name}.log"
    metrics.unlink(missing_ok=True)
    env = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    console.print(f"\n[bold]DAS {name}[/]  (log: {log}; starting takes about a minute)", soft_wrap=True)
    console.print(shlex.join(cmd), style="dim", soft_wrap=True, markup=False, highlight=False)
    rows = []
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(cmd, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            for data in _follow(metrics, process):
                row = {column: data[metric] for column, metric in FIGURES.items() if metric in data}
                rows.append(row)
                drafted = f", {row['tokens_per_step']:.2f} tokens a step where drafted" if "draft_s" in row else ""
                console.print(
                    f"  {time.monotonic() - start:4.0f} s  step {len(rows):2}: rollout {row['rollout_s']:5.2f} s, "
                    f"reward {row['reward']:.3f}, response {row['length']:.0f} tokens{drafted}",
                    soft_wrap=True,
                )
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or line.startswith("das-verl:")]
        raise SystemExit(f"quickstart: the training failed, see {log}\n  {(errors or lines or ['no output'])[-1]}")
    return rows


def _follow(path: Path, process: subprocess.Popen) -> Iterator[dict[str, float]]:
    """Yield the training steps that verl's file logger writes to ``path`` until ``process`` ends."""
    read = 0
    while True:
        ended = process.poll() is not None
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        for line in lines[read:]:
            data = json.loads(line)["data"]
            if "timing_s/gen" in data:
                yield data
        read = len(lines)
        if ended:
            return
        time.sleep(0.3)


def total(rows: list[dict[str, float]], column: str, first: int = 0) -> float:
    """Sum a column from step ``first`` on."""
    return sum(row[column] for row in rows[first:])


def show(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Print the table per step and the totals; return the totals."""
    off, on = runs["off"], runs["on"]
    table = Table(title="DAS off and on: rollout seconds, tokens per engine step, reward, response length")
    for name in ("step", "s off", "s on", "ratio", "tok*", "tok", "rew off", "on", "len off", "on"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, (a, b) in enumerate(zip(off, on, strict=True)):
        table.add_row(
            str(i + 1),
            f"{a['rollout_s']:.2f}",
            f"{b['rollout_s']:.2f}",
            f"{b['rollout_s'] / a['rollout_s']:.2f}",
            f"{b['tokens_per_step']:.2f}",
            f"{b['tokens_per_step_all']:.2f}",
            f"{a['reward']:.3f}",
            f"{b['reward']:.3f}",
            f"{a['length']:.0f}",
            f"{b['length']:.0f}",
            end_section=(i + 1) % STEPS_PER_EPOCH == 0,
        )
    console.print()
    console.print(table)
    console.print("tok*: where a draft was verified; tok: over every engine step of every request", soft_wrap=True)
    first = STEPS_PER_EPOCH if len(off) > STEPS_PER_EPOCH else 0
    totals = {
        "rollout_s_off": total(off, "rollout_s"),
        "rollout_s_on": total(on, "rollout_s"),
        "rollout_ratio": total(on, "rollout_s") / total(off, "rollout_s"),
        "rollout_ratio_after_first_epoch": total(on, "rollout_s", first) / total(off, "rollout_s", first),
        "rollout_ratio_median_after_first_epoch": statistics.median(
            b["rollout_s"] / a["rollout_s"] for a, b in zip(off[first:], on[first:], strict=True)
        ),
        "step_ratio_after_first_epoch": total(on, "step_s", first) / total(off, "step_s", first),
        "reward_off_last_epoch": total(off, "reward", -STEPS_PER_EPOCH) / len(off[-STEPS_PER_EPOCH:]),
        "reward_on_last_epoch": total(on, "reward", -STEPS_PER_EPOCH) / len(on[-STEPS_PER_EPOCH:]),
        "tokens_per_step_after_first_epoch": total(on, "tokens_per_step", first) / len(on[first:]),
    }
    ratio, median = totals["rollout_ratio_after_first_epoch"], totals["rollout_ratio_median_after_first_epoch"]
    console.print(
        f"\nRollout after the first epoch: [bold]{ratio:.2f}[/] of the time without DAS "
        f"({total(on, 'rollout_s', first):.0f} s instead of {total(off, 'rollout_s', first):.0f} s; median of the "
        f"steps {median:.2f}). Whole training steps: {totals['step_ratio_after_first_epoch']:.2f}.\n"
        f"Reward, mean of the last epoch: {totals['reward_off_last_epoch']:.3f} off, "
        f"{totals['reward_on_last_epoch']:.3f} on.",
        soft_wrap=True,
    )
    return totals


def plot(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw the reward curves on top of each other and the rollout times beside each other."""
    figure, (reward, times) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, (name, rows) in enumerate(runs.items()):
        steps = [n + 1 for n in range(len(rows))]
        reward.plot(steps, [row["reward"] for row in rows], label=f"DAS {name}")
        times.bar([n + 0.4 * i - 0.2 for n in steps], [row["rollout_s"] for row in rows], 0.4, label=f"DAS {name}")
    for axes, label in ((reward, "reward (mean of the batch)"), (times, "rollout, seconds")):
        for epoch in range(STEPS_PER_EPOCH, len(runs["off"]), STEPS_PER_EPOCH):
            axes.axvline(epoch + 0.5, color="0.85", zorder=0)
        axes.set(xlabel="training step", ylabel=label, ylim=(0, None))
        axes.legend()
    figure.suptitle("GRPO on a CPU, the same training with DAS off and on (lines: epochs)")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the quickstart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--steps", type=int, default=3 * STEPS_PER_EPOCH, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=1, help="seed of both runs")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both runs")
    args = parser.parse_args()
    if args.steps < 1:
        raise SystemExit(f"quickstart: --steps={args.steps} must be at least 1")
    out = args.out.resolve()
    make_data.write(out / "data", train=PROMPTS, val=BATCH, seed=0)
    commands = {das: command(out, das, args.steps, args.seed, args.overrides) for das in ("off", "on")}
    runs = {das: train(das, cmd, out) for das, cmd in commands.items()}
    totals = show(runs)
    plot(runs, out / "results.png")
    results = {"totals": totals, "steps": runs, "commands": {das: shlex.join(cmd) for das, cmd in commands.items()}}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    console.print(f"Wrote {out}/results.json and {out}/results.png", soft_wrap=True)


if __name__ == "__main__":
    main()
