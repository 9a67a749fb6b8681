"""Lossless is the product: with drafts, right or wrong, vLLM samples from the policy's own distribution.

The model is small enough to know exactly how likely each response of three tokens is, under any sampling parameters.
Drafts are forced through the trees; the first token of a response comes without a draft, the second and the third are
drafted, so acceptance, rejection and the bonus token all take part.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from das_verl.history import prompt_key
from das_verl.vllm.worker import pack_history

pytestmark = pytest.mark.engine

VOCABULARY = 10
PROMPT = [3, 1, 4, 1, 5]
SAMPLES = 20_000
TOKENS = 3
BATCH = 250
DAS = {"max_draft": 2, "verify_tokens": 1_000_000, "window": VOCABULARY}
# Per-request parameters, mixed in one batch: each request must get its own.
CASES: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.6": {"temperature": 0.6},
    "T=1.7": {"temperature": 1.7},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
}


@pytest.fixture(scope="module")
def logits(tiny_model: Path) -> dict[tuple[int, ...], np.ndarray]:
    """The model's next-token logits after each response prefix of up to two tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prefixes = [p for n in range(TOKENS) for p in itertools.product(range(VOCABULARY), repeat=n)]
    with torch.no_grad():
        return {p: model(torch.tensor([PROMPT + list(p)])).logits[0, -1].double().numpy() for p in prefixes}


def next_token(logits: np.ndarray, temperature: float, top_p: float = 1.0, top_k: int = 0) -> np.ndarray:
    """Softmax with temperature, top-k and top-p, the textbook way."""
    scaled = logits / temperature
    if top_k:
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    keep = np.cumsum(p[order]) - p[order] < top_p
    p[order[~keep]] = 0.0
    return p / p.sum()


def exact(logits: dict[tuple[int, ...], np.ndarray], case: dict[str, Any]) -> np.ndarray:
    """Probability of every response, shape (10, 10, 10)."""
    p = np.zeros((VOCABULARY,) * TOKENS)
    for response in itertools.product(range(VOCABULARY), repeat=TOKENS):
        p[response] = np.prod([next_token(logits[response[:i]], **case)[t] for i, t in enumerate(response)])
    return p


def history(logits: dict[tuple[int, ...], np.ndarray], likely: bool) -> list[np.ndarray]:
    """For each first token a trajectory that goes on with the likeliest, or least likely, tokens."""
    pick = np.argmax if likely else np.argmin
    trajectories = []
    for first in range(VOCABULARY):
        second = int(pick(logits[(first,)]))
        third = int(pick(logits[(first, second)]))
        trajectories.append(np.array([PROMPT[-2], PROMPT[-1], first, second, third], dtype=np.int32))
    return trajectories


def sample(llm: Any, samples: int, trajectories: list[np.ndarray] | None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Sample ``samples`` responses of each case in mixed batches, drafting from ``trajectories``, if any.

    Returns the token ids of each case, shape (samples, 3), and the totals of drafted, accepted and verified.
    """
    from vllm import SamplingParams

    # A tree for each request, so that the trajectories alone decide what is drafted. One token more than is looked
    # at, so that two tokens are drafted.
    keys = [f"{prompt_key(PROMPT)}-{i}" for i in range(BATCH)]
    params = [
        SamplingParams(
            **case, max_tokens=TOKENS + 1, detokenize=False, extra_args={"das": key} if trajectories else None
        )
        for key, case in zip(keys, itertools.cycle(CASES.values()), strict=False)
    ]
    prompts = [{"prompt_token_ids": PROMPT}] * BATCH
    tokens, totals = [], np.zeros(3, dtype=int)
    for _ in range(samples * len(CASES) // BATCH):
        if trajectories:
            llm.collective_rpc("das_update", args=(pack_history(dict.fromkeys(keys, trajectories)), None))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += [o.outputs[0].token_ids[:TOKENS] for o in outputs]
        if trajectories:
            totals += np.sum(llm.collective_rpc("das_counts")[0]["requests"], axis=0)
    by_case = np.array(tokens).reshape(-1, len(CASES), TOKENS)
    return {name: by_case[:, i] for i, name in enumerate(CASES)}, totals


def p_value(tokens: np.ndarray, p: np.ndarray) -> float:
    """Chi-square test of sampled responses against their exact probabilities, rare responses pooled."""
    if np.any(p[tuple(tokens.T)] == 0):
        return 0.0  # a response that the sampling parameters exclude
    counts = np.zeros(p.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    expected, counts = p.ravel() * len(tokens), counts.ravel()
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    counts = np.append(counts[common], counts[~common].sum())
    used = expected > 0
    return float(stats.chisquare(counts[used], expected[used] * counts.sum() / expected.sum()).pvalue)


@pytest.fixture(scope="module")
def llm(engine: Any, tiny_model: Path) -> Any:
    return engine(tiny_model, das=DAS, max_num_seqs=BATCH)


@pytest.mark.parametrize("likely", [True, False], ids=["mostly right", "mostly wrong"])
def test_drafting_does_not_change_the_distribution(llm: Any, logits: Any, likely: bool) -> None:
    tokens, (drafted, accepted, verified) = sample(llm, SAMPLES, history(logits, likely))
    print(f"drafted {drafted}, accepted {accepted / drafted:.2f}, verify steps {verified}")
    assert verified > 0.9 * SAMPLES * len(CASES)
    assert accepted / drafted > 0.5 if likely else accepted / drafted < 0.2
    # 5 cases in two runs: a right sampler fails one of them with probability 1e-3.
    p = {name: p_value(tokens[name], exact(logits, case)) for name, case in CASES.items()}
    print(p)
    assert min(p.values()) > 1e-4, p


def test_undrafted_requests_agree_with_the_reference(llm: Any, logits: Any) -> None:
    p = {
        name: p_value(tokens, exact(logits, CASES[name])) for name, tokens in sample(llm, SAMPLES // 4, None)[0].items()
    }
    assert min(p.values()) > 1e-4, p


def test_the_check_notices_vllm_without_the_fix(engine: Any, tiny_model: Path, logits: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    # Defined here, so that it travels to the worker process by value.
    def put_vllms_own_back(worker: Any) -> bool:
        from vllm.v1.sample import rejection_sampler

        from das_verl.vllm.fixes import sampling_is_lossless

        rejection_sampler.expand_batch_to_tokens = rejection_sampler.expand_batch_to_tokens.__wrapped__
        return sampling_is_lossless()

    llm = engine(tiny_model, das=DAS, max_num_seqs=BATCH)
    assert llm.collective_rpc(put_vllms_own_back) == [False]
    try:
        tokens, _ = sample(llm, SAMPLES // 4, history(logits, True))
    except EngineDeadError:
        return  # parameters from uninitialised memory were out of bounds
    assert min(p_value(tokens[name], exact(logits, case)) for name, case in CASES.items()) < 1e-4


def test_drafts_reach_up_to_the_end_of_the_context(engine: Any, tiny_model: Path) -> None:
    from vllm import SamplingParams

    das = {"max_draft": 8, "verify_tokens": 1_000_000}
    llm = engine(tiny_model, das=das, max_num_seqs=4, max_model_len=64)
    key = prompt_key(PROMPT)
    prompt = {"prompt_token_ids": PROMPT}
    greedy = SamplingParams(temperature=0.0, max_tokens=100, detokenize=False)
    plain = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
    assert len(PROMPT) + len(plain) == 64
    trajectory = np.array([*PROMPT, *plain], dtype=np.int32)
    llm.collective_rpc("das_update", args=(pack_history({key: [trajectory]}), None))
    greedy.extra_args = {"das": key}
    drafted = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
    assert drafted == plain
    counts = llm.collective_rpc("das_counts")[0]
    # 59 tokens, up to 9 a step: without drafts near the end it would take some steps more.
    assert counts["steps"] <= 10
