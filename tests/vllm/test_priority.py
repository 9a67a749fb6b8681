"""What the scheduler relies on in vLLM's priority scheduling: the order of starts, and that preemption ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from das_verl.history import prompt_key

pytestmark = pytest.mark.engine

PROMPT = [3, 1, 4, 1, 5]


def test_the_longest_start_first_and_all_end_where_memory_is_short(engine: Any, tiny_model: Path) -> None:
    from vllm import SamplingParams

    # Room for 11 blocks of 32 tokens; two requests of 200 tokens need 14, so one of them is preempted.
    memory = {"block_size": 32, "num_gpu_blocks_override": 12, "max_num_seqs": 2}
    vllm = engine(tiny_model, scheduling_policy="priority", **memory).llm_engine
    # The first two start at once and keep the engine busy while the others come, the shortest first.
    lengths = {"busy": 220, "busy too": 219} | {str(n): n for n in range(80, 201, 20)}
    for name, length in lengths.items():
        extra = {"das": prompt_key(PROMPT)}
        params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, extra_args=extra)
        vllm.add_request(name, {"prompt_token_ids": PROMPT}, params, priority=-length)
    started: dict[str, None] = {}
    ended: dict[str, int] = {}
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            started[output.request_id] = None
            if output.finished:
                ended[output.request_id] = len(output.outputs[0].token_ids)
    assert ended == lengths
    assert [name for name in started if name.isdigit()] == ["200", "180", "160", "140", "120", "100", "80"]
