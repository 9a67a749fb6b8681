#!/usr/bin/env python3
"""Time bare vLLM engines with DAS, with vLLM's own drafters and without, on the same prompts, in turns.

All engines live in one process tree and generate the same batch one after another, epoch after epoch, each with its
own history. Prints the milliseconds that each took for a token, since sampled responses differ in length, and over the
epochs after the first two the median of the ratios to the first method.

    bench_engine.py --model outputs/smollm2-135m --prompts train.parquet --requests 16 --max-tokens 256

Methods: none, das, das:V with a constant das.verify_tokens, ngram:K, and suffix where arctic-inference is installed.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import numpy as np
import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]


def prompts_of(args, tokenizer):
    """Token ids of the first prompts of a parquet file with verl's `prompt` column."""
    rows = pd.read_parquet(args.prompts)["prompt"][: args.requests // args.samples]
    encode = tokenizer.apply_chat_template
    return [[int(t) for t in encode(list(p), add_generation_prompt=True, return_dict=False)] for p in rows]


def start(method, args):
    """Start an engine that drafts by a method."""
    from vllm import LLM

    name, _, value = method.partition(":")
    kwargs = {}
    if name == "das":
        das = yaml.safe_load((ROOT / "configs/das/on.yaml").read_text())["das"]
        if value:
            das["verify_tokens"] = int(value)
        kwargs = {
            "speculative_config": {
                "method": "custom_class",
                "model": "das_verl.vllm.proposer.Proposer",
                "num_speculative_tokens": das["max_draft"],
            },
            "additional_config": {"das": das},
            "worker_extension_cls": "das_verl.vllm.worker.DrafterExtension",
        }
    elif name == "ngram":
        ngram = {"method": "ngram", "num_speculative_tokens": int(value or 3), "prompt_lookup_max": 4}
        kwargs = {"speculative_config": ngram}
    elif name == "suffix":
        kwargs = {"speculative_config": {"method": "suffix"}}
    elif name != "none":
        raise SystemExit(f"method {method!r} is not one of none, das, das:V, ngram:K, suffix")
    llm = LLM(
        args.model, skip_tokenizer_init=True, enforce_eager=True, seed=0, max_num_seqs=args.requests,
        max_model_len=args.max_model_len, **kwargs,
    )  # fmt: skip
    if name == "das":
        llm.collective_rpc("das_attach")
    return llm


def epoch(llm, prompts, args, seed):
    """Generate the batch; return seconds and the responses."""
    from vllm import SamplingParams

    rows = [i // args.samples for i in range(args.requests)]
    params = [
        SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, detokenize=False, seed=seed + i,
            extra_args={"das": f"prompt {row}"},
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompts[row]} for row in rows], params, use_tqdm=False)
    return time.perf_counter() - begin, [(row, o.outputs[0].token_ids) for row, o in zip(rows, outputs, strict=True)]


def main():
    """Time the methods, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, type=Path, help="parquet file with verl's columns")
    parser.add_argument("--methods", default="none,das", help="separated by commas")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--samples", type=int, default=1, help="responses to each prompt")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    from das_verl.vllm.worker import pack_history

    prompts = prompts_of(args, AutoTokenizer.from_pretrained(args.model))
    methods = args.methods.split(",")
    engines = {method: start(method, args) for method in methods}
    history = {method: {} for method in methods}
    per_token = {method: [] for method in methods}
    for n in range(args.epochs):
        # Each epoch begins with another, so that none always follows the same.
        for method in methods[n % len(methods) :] + methods[: n % len(methods)]:
            if method.startswith("das"):
                newest = {k: v[-16:] for k, v in history[method].items()}
                engines[method].collective_rpc("das_update", args=(pack_history(newest), None))
                time.sleep(0.5)  # as while the policy is updated
            taken, responses = epoch(engines[method], prompts, args, seed=1000 * n)
            per_token[method].append(1e3 * taken / sum(len(tokens) for _, tokens in responses))
            for row, tokens in responses:
                text = np.array([*prompts[row][-8:], *tokens], np.int32)
                history[method].setdefault(f"prompt {row}", []).append(text)
            print(f"epoch {n + 1} {method}: {taken:.2f} s, {sum(len(t) for _, t in responses)} tokens", flush=True)
    first = methods[0]
    table = Table("method", "ms a token, by epoch", f"relative to {first}", "after the second epoch, median")
    figures = {}
    for method in methods:
        ratios = [a / b for a, b in zip(per_token[method], per_token[first], strict=True)]
        figures[method] = {"ms_per_token": per_token[method], "median_ratio": statistics.median(ratios[2:] or ratios)}
        table.add_row(
            method,
            " ".join(f"{t:.2f}" for t in per_token[method]),
            " ".join(f"{r:.2f}" for r in ratios),
            f"{figures[method]['median_ratio']:.2f}",
        )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(vars(args) | {"prompts": str(args.prompts), "methods": figures}, default=str))


if __name__ == "__main__":
    main()
