"""Where prompts become requests: tags every training request and reports every training trajectory.

verl's agent-loop manager runs in the driver's task runner and starts one worker actor or more; each worker runs
one agent loop per trajectory, single-turn or not. Only here is it known that a request belongs to training
and not to validation, which trajectory it is part of (also when it is resumed after an abort, as prompt plus
partial output, or is a later turn), and when that trajectory is complete.
"""

from __future__ import annotations

import hashlib
import json
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from das_verl.history import prompt_key
from das_verl.verl.metrics import log_speculation

# The class that verl decorated with ray.remote, which cannot be subclassed itself.
_AgentLoopWorkerTQ: Any = vars(AgentLoopWorkerTQ)["__ray_metadata__"].modified_class


@dataclass
class Trajectory:
    """The training trajectory that the current task generates; ``key`` is set by its first request."""

    prompt: str
    key: str | None = None


_current: ContextVar[Trajectory | None] = ContextVar("das_trajectory", default=None)


def fingerprint(raw_prompt: Any) -> str:
    """Name a raw prompt (the messages of one row of the data set) before it is tokenised.

    Images and the like count by their type alone: prompts that share their text share a name, and so the history
    that is sent ahead of them. That costs drafts, not correctness.
    """
    text = json.dumps(list(raw_prompt), default=lambda value: type(value).__name__)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class TaggingClient:
    """verl's LLM client, adding the current trajectory's key to each request.

    The tag travels in ``sampling_params["extra_args"]["das"]`` to the drafter. A request without one, such as
    a validation request, is served without drafts.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name == "_client":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._client, name)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Forward to verl's client with the tag added; called by every agent loop."""
        trajectory = _current.get()
        if trajectory is not None:
            if trajectory.key is None:
                trajectory.key = prompt_key(prompt_ids)
            extra_args = {**(sampling_params.get("extra_args") or {}), "das": trajectory.key}
            sampling_params = {**sampling_params, "extra_args": extra_args}
        return await self._client.generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)


class AgentLoopWorker(_AgentLoopWorkerTQ):
    """verl's agent-loop worker; knows where each training trajectory begins and ends."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)
        self.llm_client = TaggingClient(llm_client)
        self._scheduler = llm_client._load_balancer

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        if not trajectory["validate"]:
            _current.set(Trajectory(fingerprint(kwargs["raw_prompt"])))
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        trajectory = _current.get()
        if trajectory is not None and trajectory.key is not None:
            for part in output if isinstance(output, list) else [output]:
                self._scheduler.report.remote(trajectory.prompt, trajectory.key, part.prompt_ids, part.response_ids)
        await super()._agent_loop_postprocess(output, validate, **kwargs)


class AgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager, telling the scheduler which prompts a step will generate."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)
        self.agent_loop_workers_class = ray.remote(AgentLoopWorker)
        self._scheduler = llm_client._load_balancer
        ray.get(self._scheduler.configure.remote(OmegaConf.to_container(config.das, resolve=True)))
        log_speculation(lambda: ray.get(self._scheduler.end_step.remote()))

    def generate_sequences(self, prompts: Any) -> None:
        """Announce a training batch to the scheduler, then dispatch it as verl does."""
        # `get` would return a TensorDict's wrapper of the value, which has no truth value.
        validate = prompts["validate"] if "validate" in prompts else False  # noqa: SIM401
        if not validate:
            ray.get(self._scheduler.begin_step.remote([fingerprint(p) for p in prompts["raw_prompt"]]))
        super().generate_sequences(prompts)
