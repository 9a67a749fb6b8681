"""Shared test set-up: real engines on a CPU, and a model small enough to know its distribution exactly."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

# Before anything imports vLLM or transformers.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    # Lets a test send a function into the worker process.
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    HF_HUB_OFFLINE="1",
    VERL_PLATFORM="cpu",
    TOKENIZERS_PARALLELISM="false",
)

settings.register_profile(
    "das",
    derandomize=True,
    deadline=None,  # the first call of a kernel compiles it
    database=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("das")

ROOT = Path(__file__).parent.parent
VOCABULARY = 10


def default_das_section() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs/das/on.yaml").read_text())["das"]


@pytest.fixture
def das_section() -> dict[str, Any]:
    """The defaults of the ``das:`` section, as ``+das=on`` sets them."""
    return default_das_section()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What das-verl logs; its logger has a handler of its own and passes nothing on."""
    logger = logging.getLogger("das_verl")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 10 tokens and random weights, whose next-token distributions are neither flat nor sharp."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    model.lm_head.weight.data *= 1.8
    path = tmp_path_factory.mktemp("model") / "tiny"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def start_engine() -> Callable[..., Any]:
    """Return a function that starts a vLLM engine on the CPU, with DAS attached unless ``das`` is None."""

    def start(model: Path, das: dict[str, Any] | None = (), **kwargs: Any) -> Any:
        from vllm import LLM

        if das is not None:
            section = default_das_section() | dict(das)
            kwargs |= {
                "speculative_config": {
                    "method": "custom_class",
                    "model": "das_verl.vllm.proposer.Proposer",
                    "num_speculative_tokens": section["max_draft"],
                },
                "additional_config": {"das": section},
                "worker_extension_cls": "das_verl.vllm.worker.DrafterExtension",
            }
        llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            **({"dtype": "float32", "max_model_len": 256, "enable_prefix_caching": False} | kwargs),
        )
        if das is not None:
            llm.collective_rpc("das_attach")
        return llm

    return start


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Like ``start_engine``, for one module, which has one engine at a time; it is gone after the module."""
    running: list[Any] = []

    def stop() -> None:
        while running:
            running.pop().llm_engine.engine_core.shutdown()
        gc.collect()

    def start(*args: Any, **kwargs: Any) -> Any:
        stop()
        running.append(start_engine(*args, **kwargs))
        return running[-1]

    yield start
    stop()
