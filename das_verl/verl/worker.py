"""The extension that vLLM mixes into its worker class, for verl: drafter calls, and weights on a CPU."""

from __future__ import annotations

from typing import Any

from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from das_verl.vllm.worker import DrafterExtension


class WorkerExtension(DrafterExtension, vLLMColocateWorkerExtension):
    """verl's worker extension with das-verl's calls added."""

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Take the actor's weights; called by verl after every update of the policy.

        vLLM's CPU layers repack their weights when they are loaded, so writing into them afterwards, as verl
        does, leaves the packed copy stale: on a CPU the weights go through vLLM's own reload instead.
        """
        if get_device_name() != "cpu":
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        weights: list[tuple[str, Any]] = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        # The shared memory that a bucket lies in is closed before the weights are loaded.
        receiver.receive_weights(
            on_bucket_received=lambda bucket, is_last: weights.extend((n, t.clone()) for n, t in bucket)
        )
        self.model_runner.reload_weights(weights_iterator=iter(weights))
