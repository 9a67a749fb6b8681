"""Train the quickstart's pocket policy from nothing, on worked solutions with slips in them.

At temperature 1 the policy slips about as often as its lessons do, while its most likely token is
right: RL has something to sharpen.

Usage: python recipes/quickstart/make_policy.py [--out DIR] [--steps N]
"""

import argparse
import os
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import task
import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 0
STEPS = 1200
BATCH_TOKENS = 3072
LEARNING_RATE = 5e-3
MAX_RESPONSE = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
console = Console()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """
    Make a byte-level BPE that spells out digits and knows the question's words.

    Returns
    -------
    PreTrainedTokenizerFast
        With its chat template.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    entries = list(islice(task.problems(SEED), task.CYCLE))
    tokenizer.train_from_iterator((entry[key] for entry in entries for key in ("question", "solution")), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """
    Make the untrained model.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        Gives the vocabulary and its special tokens.

    Returns
    -------
    Qwen2ForCausalLM
        About 3 M parameters, in heads of 64, a size that vLLM's CPU attention supports.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def chat(question: str) -> list[dict]:
    """
    Put a question as verl does.

    Parameters
    ----------
    question : str
        The user's message.

    Returns
    -------
    list of dict
        For the chat template.
    """
    return [{"role": "user", "content": question}]


def lessons(tokenizer: PreTrainedTokenizerFast):
    """
    Draw batches of worked solutions with slips, without end.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        The policy's tokenizer.

    Yields
    ------
    tuple of torch.Tensor
        Inputs and labels; the prompt and the padding have no label.
    """
    rng = Random(SEED)
    entries = task.problems(SEED + 1)
    while True:
        pairs = []
        for entry in islice(entries, 1024):
            solution = task.solve(*entry["metadata"]["numbers"], rng)
            prompt = tokenizer.apply_chat_template(
                chat(entry["question"]), add_generation_prompt=True, return_dict=False
            )
            response = [*tokenizer(solution)["input_ids"], tokenizer.eos_token_id]
            if len(response) < MAX_RESPONSE:
                pairs.append((prompt + response, len(prompt)))
        pairs.sort(key=lambda pair: len(pair[0]))
        batches = []
        while pairs:
            width = len(pairs[-1][0])
            count = max(1, BATCH_TOKENS // width)
            batches.append((width, pairs[-count:]))
            del pairs[-count:]
        rng.shuffle(batches)
        for width, batch in batches:
            ids = torch.full((len(batch), width), tokenizer.pad_token_id)
            labels = torch.full_like(ids, -100)
            for row, (tokens, start) in enumerate(batch):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, start : len(tokens)] = ids[row, start : len(tokens)]
            yield ids, labels


def train(model: Qwen2ForCausalLM, batches, steps: int) -> float:
    """
    Train by next-token prediction.

    Parameters
    ----------
    model : Qwen2ForCausalLM
        Changed in place.
    batches : iterable
        Inputs and labels.
    steps : int
        Number of batches.

    Returns
    -------
    float
        Mean loss of the last tenth of the steps.
    """
    # Muon learns this in half the time of AdamW, and has no update for what is not a hidden matrix.
    hidden, rest = [], []
    for name, weight in model.named_parameters():
        (hidden if weight.ndim == 2 and "embed" not in name else rest).append(weight)
    optimizers = (
        torch.optim.Muon(hidden, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    )
    warmup, decay = 0.05 * steps, 0.4 * steps
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup, (steps - step) / decay))
        for optimizer in optimizers
    ]
    losses = []
    with Progress(*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        bar = progress.add_task("training", total=steps, loss=float("nan"))
        for ids, labels in islice(batches, steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(bar, advance=1, loss=losses[-1])
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def report(policy: Path, prompts: int, samples: int) -> None:
    """
    Print rewards and lengths of a policy, sampled with vLLM, by stratum.

    Parameters
    ----------
    policy : pathlib.Path
        Its folder.
    prompts : int
        Number of prompts.
    samples : int
        Samples of each at temperature 1.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams  # reads the environment as it is imported

    entries = list(islice(task.problems(SEED + 2, distinct=True), prompts))
    chats = [chat(entry["question"]) for entry in entries]
    llm = LLM(str(policy), dtype="bfloat16", enforce_eager=True, max_model_len=2 * MAX_RESPONSE)

    def sample(**options) -> tuple[np.ndarray, np.ndarray]:
        params = SamplingParams(top_k=-1, max_tokens=MAX_RESPONSE, **options)
        outputs = [output.outputs for output in llm.chat(chats, params, use_tqdm=False)]
        rewards = [
            [task.compute_score(task.DATA_SOURCE, response.text, entry["answer"]) for response in group]
            for group, entry in zip(outputs, entries, strict=True)
        ]
        return np.array(rewards), np.array([[len(response.token_ids) for response in group] for group in outputs])

    rewards, lengths = sample(temperature=1, n=samples)
    greedy, _ = sample(temperature=0)
    mean = rewards.mean(1)
    table = Table("prompts", "reward, T=1", "mixed groups", "reward, greedy", "tokens p10", "p50", "p90", "p99", "max")
    for name in (*(stratum.name for stratum in task.STRATA), "all"):
        rows = np.array([name in (entry["stratum"], "all") for entry in entries])
        mixed = (mean > 0) & (mean < 1)
        table.add_row(
            f"{name} ({rows.sum()})",
            *(f"{x[rows].mean():.2f}" for x in (mean, mixed, greedy)),
            *(f"{x:.0f}" for x in np.quantile(lengths[rows], [0.1, 0.5, 0.9, 0.99, 1])),
        )
    console.print(table)
    console.print(f"cut at {MAX_RESPONSE} tokens: {(lengths >= MAX_RESPONSE).mean():.1%}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the quickstart's pocket policy from nothing.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "policy")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    console.print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")
    loss = train(model, lessons(tokenizer), args.steps)
    console.print(f"final loss {loss:.4f} a token")
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out, save_jinja_files=False)
    # transformers 5 writes its new name of the class, which 4 does not know; 5 still knows the old one.
    config = args.out / "tokenizer_config.json"
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    report(args.out, prompts=96, samples=8)


if __name__ == "__main__":
    main()
