"""What DAS did in a step, as numbers in verl's logger."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TELLING = 256  # drafted tokens of a step from which its acceptance means something


def summarise(counts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Turn the replicas' counts of one step into metrics.

    Parameters
    ----------
    counts : sequence of dict
        What :meth:`das_verl.vllm.proposer.Proposer.counts` returned, one a replica.

    Returns
    -------
    dict
        ``rollout/spec_*``: verl's own speculation metrics, means over requests; ``das/*``: see docs/metrics.md.
    """
    from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

    requests = [r for c in counts for r in c["requests"]]
    drafted, accepted, verified = ([r[i] for r in requests] for i in range(3))
    metrics = compute_spec_decode_metrics(drafted, accepted, verified)

    def total(name: str) -> float:
        return sum(c[name] for c in counts)

    def slowest(name: str) -> float:
        return max((c[name] for c in counts), default=0.0)

    metrics |= {
        "das/draft_tokens": sum(drafted),
        "das/accepted_tokens": sum(accepted),
        "das/accept_rate": sum(accepted) / max(1, sum(drafted)),
        # Tokens that a request gains in an engine step in which a draft of it was verified.
        "das/tokens_per_step": 1 + sum(accepted) / max(1, sum(verified)),
        # The same over all engine steps of all tagged requests, drafted or not.
        "das/tokens_per_step_all": total("tokens") / max(1, total("steps")),
        "das/draft_s": slowest("draft_s"),
        "das/build_s": slowest("build_s"),
        "das/build_visible_s": slowest("visible_s"),
        "das/build_hidden_s": max((max(0.0, c["build_s"] - c["visible_s"]) for c in counts), default=0.0),
        "das/tree_bytes": slowest("tree_bytes"),
        "das/history_share": total("with_history") / max(1, total("opened")),
    }
    known = [c["verify_tokens"] for c in counts if not math.isnan(c["verify_tokens"])]
    if known:
        metrics["das/verify_tokens"] = statistics.fmean(known)
    return metrics


def collapsed(metrics: Mapping[str, float], before: Sequence[float]) -> bool:
    """Return whether acceptance has collapsed in a step: a quarter of what it usually was, or less.

    Parameters
    ----------
    metrics : mapping of str to float
        Of the step, from :func:`summarise`.
    before : sequence of float
        ``das/accept_rate`` of the steps before that drafted; fewer than three tell nothing.
    """
    if len(before) < 3 or metrics["das/draft_tokens"] < _TELLING:
        return False
    return metrics["das/accept_rate"] < statistics.median(before) / 4


def log_speculation(metrics: Callable[[], dict[str, float]]) -> None:
    """Add the metrics of :func:`summarise` to those that verl's trainer logs in this process.

    verl's V1 trainer computes its speculation metrics only when multi-token prediction is on
    (verl/trainer/ppo/v1/trainer_base.py, ``_compute_metrics``: ``compute_spec_decode_metrics(None, None, None)``),
    and offers no other way to add a metric. Replaces that one name in the trainer's module by a function that
    answers with DAS's figures where verl has none; where verl passes figures of its own, verl's function runs.
    """
    from verl.trainer.ppo.v1 import trainer_base

    original = getattr(
        trainer_base.compute_spec_decode_metrics, "__wrapped__", trainer_base.compute_spec_decode_metrics
    )

    @functools.wraps(original)
    def with_das(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {**metrics(), **original(*args, **kwargs)}

    setattr(trainer_base, "compute_spec_decode_metrics", with_das)  # noqa: B010
