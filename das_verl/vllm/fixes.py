"""Fixes for faults of vLLM, each guarded by a check of the behaviour that it mends."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def _loses_parameters(expand: Callable[[torch.Tensor, torch.Tensor, int, int, int], torch.Tensor]) -> bool:
    values = torch.tensor([0.5, 2.0, 0.0])
    cumulative = torch.tensor([2, 2, 3], dtype=torch.int32)
    return not torch.equal(expand(values, cumulative, 3, 0, 1), torch.tensor([0.5, 0.5, 1.0]))


def sampling_is_lossless() -> bool:
    """Check that vLLM's rejection sampler hands each drafted token the sampling parameters of its request.

    Ask on the CPU platform, once the model runner exists. ``expand_batch_to_tokens`` repeats each request's value
    once per draft token; where it returns anything else, the temperature, top-k and top-p of drafted tokens are
    arbitrary.
    """
    from vllm.v1.sample import rejection_sampler

    return not _loses_parameters(rejection_sampler.expand_batch_to_tokens)


def fix_expansion() -> None:
    """Replace the CPU build's ``expand_batch_to_tokens`` where its kernel does not write its result.

    vllm/utils/cpu_triton_utils.py, ``_expand_kernel_impl`` (vLLM 0.24 to 0.32): the output is converted to int64 and
    the kernel writes into that copy, so the output itself stays uninitialised. Does nothing on other platforms,
    where Triton runs on the CPU, or where the kernel is right.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return
    current_platform.import_kernels()
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    def by_kernel(x: torch.Tensor, cumulative: torch.Tensor, n: int, old: int, new: int) -> torch.Tensor:
        out = torch.zeros(n, dtype=x.dtype)
        cpu_triton_utils.expand_kernel[(len(x),)](out, x, cumulative, old, new, MAX_NUM_TOKENS=n)
        return out

    @functools.wraps(rejection_sampler.expand_batch_to_tokens)
    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        expanded = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
        return expanded.masked_fill(expanded == replace_from, replace_to)

    if _loses_parameters(by_kernel):
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
