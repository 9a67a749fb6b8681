"""The scheduler: verl's request router, which also remembers rollouts and tells the replicas what a step needs.

verl creates one Ray actor of :class:`Scheduler` from ``rollout.router_config_path`` and hands it every rollout
server. Its callers: verl's LLM client (routing), :mod:`das_verl.verl.agent_loop` (everything else).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from das_verl.config import DasConfig
from das_verl.history import TrajectoryWindow
from das_verl.verl.metrics import summarise
from das_verl.vllm.worker import pack_history


class Scheduler(GlobalRequestLoadBalancer):
    """Routes requests as verl does by default, and keeps the trajectory window.

    Parameters
    ----------
    servers : dict of str to actor handle
        Every rollout server, by address.
    router_config : dict
        The router file's content. Holds nothing but this class's name.
    """

    _history: TrajectoryWindow
    _prompt_tail: int

    def __init__(self, servers: dict[str, Any], router_config: dict[str, Any]) -> None:
        super().__init__(servers)
        self._key_of_prompt: dict[str, str] = {}

    def configure(self, das: dict[str, Any]) -> None:
        """Take the ``das:`` section; called once, by the agent-loop manager, before the first step."""
        config = DasConfig.parse(das)
        self._prompt_tail = config.prompt_tail
        self._history = TrajectoryWindow(config.window, max_bytes=int(config.history_gb * 1e9))

    def begin_step(self, prompts: Sequence[str]) -> None:
        """Send the replicas the history of the step's prompts; returns when they have it and build their trees.

        Parameters
        ----------
        prompts : sequence of str
            Fingerprints of the raw prompts. Their token ids are not known before the agent loops tokenise them,
            but a prompt that has history reported its key together with its fingerprint.
        """
        keys = dict.fromkeys(self._key_of_prompt[p] for p in prompts if p in self._key_of_prompt)
        packed = ray.put(pack_history(self._history.get(keys)))
        ray.get([server.das_begin_step.remote(packed) for server in self._servers.values()])

    def report(self, prompt: str, key: str, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        """Remember a finished training trajectory; called by the agent-loop workers.

        Parameters
        ----------
        prompt : str
            Fingerprint of the raw prompt.
        key : str
            Key of the prompt's token ids.
        prompt_ids, response_ids : sequence of int
            Token ids of the whole trajectory.
        """
        self._key_of_prompt[prompt] = key
        tail = np.asarray(prompt_ids[max(0, len(prompt_ids) - self._prompt_tail) :], dtype=np.int32)
        self._history.add(key, np.concatenate([tail, np.asarray(response_ids, dtype=np.int32)]))

    def end_step(self) -> dict[str, float]:
        """Let the replicas release the step's trees and return the step's metrics; called once per step."""
        counts: list[dict[str, Any]] = ray.get([server.das_end_step.remote() for server in self._servers.values()])
        metrics = summarise(counts)
        metrics["das/history_bytes"] = self._history.nbytes
        metrics["das/history_trajectories"] = len(self._history)
        return metrics
