"""Where prompts become requests: tags and ranks every training request and reports every training trajectory.

verl's agent-loop manager runs in the driver's task runner and starts one worker actor or more; each worker runs
one agent loop per trajectory, single-turn or not. Only here is it known that a request belongs to training
and not to validation, which trajectory it is part of (also when it is resumed after an abort, as prompt plus
partial output, or is a later turn), and when that trajectory is complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.config import omega_conf_to_dataclass

from das_verl.history import Trajectory, prompt_key, text_hash
from das_verl.verl.checkpoint import newest_snapshot, snapshot_to_resume
from das_verl.verl.look_ahead import upcoming_prompts
from das_verl.verl.metrics import log_speculation
from das_verl.verl.warm_start import read_warm_start

_log = logging.getLogger(__name__)
# The class that verl decorated with ray.remote, which cannot be subclassed itself.
_AgentLoopWorkerTQ: Any = vars(AgentLoopWorkerTQ)["__ray_metadata__"].modified_class
# Field of a batch that tells the workers how long each prompt's responses are expected to be.
_LENGTH = "das_length"


@dataclass
class Drawn:
    """A training prompt whose rollouts are running. Their first requests tell its keys, nearly always one."""

    name: str
    length: int = 0  # expected tokens of a response; 0 if nobody said
    keys: set[str] = field(default_factory=set)


@dataclass
class Running:
    """A training trajectory that is running; its requests fill in what is not known before."""

    prompt: Drawn
    key: str | None = None
    request_id: str = ""


# Each prompt, and each trajectory of it, runs in an asyncio task of its own, and so in a context of its own.
_drawn: ContextVar[Drawn | None] = ContextVar("das_prompt", default=None)
_running: ContextVar[Running | None] = ContextVar("das_trajectory", default=None)


def fingerprint(raw_prompt: Any) -> str:
    """Name a raw prompt (the messages of one row of the data set) before it is tokenised.

    Images and the like count by their type alone: prompts that share their text share a name, and so the history
    that is sent ahead of them. That costs drafts, not correctness.
    """
    return text_hash(json.dumps(list(raw_prompt), default=lambda value: type(value).__name__))


class TaggingClient:
    """verl's LLM client, adding the current trajectory's key and priority to each request.

    The request that is expected to be the longest goes first, unless the agent loop gives a priority of its own: vLLM
    takes the waiting request of the lowest number, and preempts the running one of the highest where memory is short.
    The tag travels in ``sampling_params["extra_args"]["das"]`` to the drafter. A request without one, such as
    a validation request, is served without drafts.

    Parameters
    ----------
    client : LLMServerClient
    first_seen : callable, optional
        Called with a prompt's fingerprint, key and token ids before the first request with that key.
    """

    def __init__(self, client: Any, first_seen: Callable[[str, str, list[int]], None] | None = None) -> None:
        self._client = client
        self._first_seen = first_seen

    def __getattr__(self, name: str) -> Any:
        if name == "_client":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._client, name)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Forward to verl's client with the tag added; called by every agent loop."""
        running = _running.get()
        if running is not None:
            running.request_id = request_id
            if running.key is None:
                running.key = prompt_key(prompt_ids)
                if self._first_seen is not None and running.key not in running.prompt.keys:
                    self._first_seen(running.prompt.name, running.key, prompt_ids)
                running.prompt.keys.add(running.key)
            extra_args = {**(sampling_params.get("extra_args") or {}), "das": running.key}
            sampling_params = {**sampling_params, "extra_args": extra_args}
            kwargs["priority"] = kwargs.get("priority") or -running.prompt.length
        return await self._client.generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)


class AgentLoopWorker(_AgentLoopWorkerTQ):
    """verl's agent-loop worker; knows where each training trajectory begins and ends."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)
        warm = config.das.history.warm_start is not None
        self.llm_client = TaggingClient(llm_client, self._note_first_seen if warm else None)
        self._scheduler = llm_client._load_balancer
        self._prompt_tail = config.das.prompt_tail
        self._first_seen: list[tuple[str, str, str]] = []

    def _note_first_seen(self, prompt: str, key: str, prompt_ids: list[int]) -> None:
        if not self._first_seen:
            # The prompts of a batch come within moments of each other: one call for all.
            asyncio.get_running_loop().call_later(0.05, self._send_first_seen)
        text = self.tokenizer.decode(prompt_ids, skip_special_tokens=True)
        self._first_seen.append((prompt, key, text_hash(text)))

    def _send_first_seen(self) -> None:
        self._scheduler.first_seen.remote(self._first_seen)
        self._first_seen = []

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        drawn = Drawn(fingerprint(prompt["raw_prompt"]), int(prompt.pop(_LENGTH, 0)))
        _drawn.set(drawn)
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            self._scheduler.finished.remote(drawn.name, sorted(drawn.keys))

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        drawn = _drawn.get()
        if drawn is not None:
            _running.set(Running(drawn))
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        """Report what has been generated as soon as its reward is known."""
        await super()._compute_score(outputs, kwargs)
        running = _running.get()
        if running is None or running.key is None:
            return
        for output in outputs:
            version = output.extra_fields.get("max_global_steps")
            trajectory = Trajectory.of(
                output.prompt_ids,
                output.response_ids,
                output.response_mask,
                prompt_tail=self._prompt_tail,
                step=int(kwargs.get("global_steps", -1)),
                version=-1 if version is None else int(version),
                reward=output.reward_score,
            )
            self._scheduler.report.remote(running.prompt.name, running.key, running.request_id, trajectory)


class AgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager, telling the scheduler which prompts are drawn, and which will be next."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)
        self.agent_loop_workers_class = ray.remote(AgentLoopWorker)
        self.scheduler = llm_client._load_balancer
        self._rollout = config.actor_rollout_ref.rollout
        warm = None
        if config.das.history.warm_start is not None:
            tokenizer = omega_conf_to_dataclass(config.actor_rollout_ref.model).tokenizer
            warm = read_warm_start(Path(config.das.history.warm_start).expanduser(), tokenizer, config.das.window)
        self._configure_scheduler(snapshot_to_resume(config), warm)
        log_speculation(lambda: ray.get(self.scheduler.metrics.remote()))

    def _configure_scheduler(self, path: Path | None, warm: dict[str, list[Trajectory]] | None = None) -> None:
        das = OmegaConf.to_container(self.config.das, resolve=True)
        trouble = ray.get(
            self.scheduler.configure.remote(das, path and path.read_bytes(), warm, self._rollout.full_determinism)
        )
        if trouble:
            _log.warning("%s is left out, history starts empty: %s", path, trouble)
        elif path is not None:
            _log.info("history restored from %s", path)

    def restore_scheduler(self) -> None:
        """Give the scheduler, which has been restarted, the history saved last."""
        _log.warning("the scheduler had died and was started again; its history is the last snapshot")
        self._configure_scheduler(newest_snapshot(self.config))

    def generate_sequences(self, prompts: Any) -> None:
        """Announce a training batch to the scheduler, then dispatch it as verl does."""
        # `get` would return a TensorDict's wrapper of the value, which has no truth value.
        validate = prompts["validate"] if "validate" in prompts else False  # noqa: SIM401
        if not validate:
            drawn = [fingerprint(p) for p in prompts["raw_prompt"]]
            upcoming = [fingerprint(p) for p in upcoming_prompts()]
            step = (drawn, upcoming, self._rollout.n)
            lengths = ray.get(self.scheduler.begin_step.remote(*step))
            if lengths is None:
                self.restore_scheduler()
                lengths = ray.get(self.scheduler.begin_step.remote(*step))
            if not self._rollout.full_determinism:
                prompts = prompts.copy()
                prompts[_LENGTH] = torch.tensor(lengths)
        super().generate_sequences(prompts)
