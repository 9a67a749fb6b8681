"""The rollout server: verl's vLLM server with the calls that carry a step's history to the drafter.

verl launches one per replica as a Ray actor; :class:`das_verl.verl.scheduler.Scheduler` calls the ``das_``
methods, verl everything else.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class Server(vLLMHttpServer):
    """verl's vLLM server, with das-verl's worker extension."""

    _counts: dict[str, Any] | None = None

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
        """Release the step's trees, then sleep; called by verl when the rollout is over."""
        # Only the replica's first node has the engine.
        if self.node_rank == 0 and self._drafts() and self._counts is None:
            self._counts = await self._end_step()
        await super().sleep()

    async def das_begin_step(self, packed: dict[str, Any]) -> None:
        """Start building the trees of a step in the engine's workers; returns at once.

        Parameters
        ----------
        packed : dict
            Trajectories by prompt key, as :func:`das_verl.vllm.worker.pack_history` gives them.
        """
        await self.engine.collective_rpc("das_begin_step", args=(packed,))
        self._counts = None

    async def das_end_step(self) -> dict[str, Any]:
        """Release the trees of the step, if ``sleep`` has not, and return what the drafter counted in it."""
        counts, self._counts = self._counts, None
        return await self._end_step() if counts is None else counts

    async def _end_step(self) -> dict[str, Any]:
        # Every tensor-parallel rank drafts the same; the first speaks for all.
        return (await self.engine.collective_rpc("das_end_step"))[0]


class Replica(vLLMReplica):
    """verl's vLLM replica, launching :class:`Server`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)
