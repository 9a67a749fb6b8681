"""Puts das-verl's rollout replica in the place of verl's for ``rollout.name=vllm``.

verl imports this module where it reads ``actor_rollout_ref.model.external_lib``, which ``+das=on`` and
``+platform=cpu`` set. It stays light: processes that launch no replica import it too.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry


def load_replica() -> Any:
    """Return the replica class; called by verl when it launches the rollout servers."""
    from das_verl.verl.server import Replica

    return Replica


RolloutReplicaRegistry.register("vllm", load_replica)
