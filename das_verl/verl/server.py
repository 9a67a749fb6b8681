"""The rollout server: verl's vLLM server with the calls that carry history to the drafter.

verl launches one per replica as a Ray actor; :class:`das_verl.verl.scheduler.Scheduler` calls the ``das_``
methods, verl everything else.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class Server(vLLMHttpServer):
    """verl's vLLM server, with das-verl's worker extension."""

    _scheduler: Any = None

    def _get_worker_extension_cls(self) -> str:
        return "das_verl.verl.worker.WorkerExtension"

    def _drafts(self) -> bool:
        engine_kwargs = (self.config.engine_kwargs or {}).get(self._get_engine_kwargs_key()) or {}
        return "das" in (engine_kwargs.get("additional_config") or {})

    async def run_server(self, args: Any) -> None:
        """Start the engine, then hand the drafter its model runner; called by ``launch_server``."""
        await super().run_server(args)
        if self._drafts():
            await self.engine.collective_rpc("das_attach")

    async def sleep(self) -> None:
        """Sleep, and tell the scheduler that the rollout is over; called by verl, before it updates the policy.

        Raises
        ------
        RuntimeError
            If the engine has died. verl would train on what the rollout left, then wait for ever to send it weights.
        """
        if self.node_rank == 0 and self.engine.errored:
            raise RuntimeError(
                "the vLLM engine of a rollout server has died (its own message is above); "
                "start the run again, and it resumes from its last checkpoint"
            )
        await super().sleep()
        # Only the replica's first node has the engine.
        if self.node_rank == 0 and self._scheduler is not None:
            self._scheduler.rollout_over.remote()

    async def das_connect(self, scheduler: Any) -> None:
        """Take the scheduler's handle; called by the scheduler when it first meets this server."""
        self._scheduler = scheduler

    async def das_update(self, packed: dict[str, Any], released: list[str] | None, after: None = None) -> None:
        """Release trees and start building others in the engine's workers; returns at once.

        Parameters
        ----------
        packed : dict
            Trajectories by prompt key, as :func:`das_verl.vllm.worker.pack_history` gives them.
        released : list of str, or None
            Prompt keys; None for all.
        after : None
            Outcome of the update before this one, which Ray waits for.
        """
        await self.engine.collective_rpc("das_update", args=(packed, released))

    async def das_counts(self, after: None = None) -> dict[str, Any]:
        """Return what the drafter counted since the last call; ``after`` as in :meth:`das_update`."""
        # Every tensor-parallel rank drafts the same; the first speaks for all.
        return (await self.engine.collective_rpc("das_counts"))[0]


class Replica(vLLMReplica):
    """verl's vLLM replica, launching :class:`Server`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)
