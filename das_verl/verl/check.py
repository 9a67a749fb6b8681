"""Checks of the whole verl config, in the driver, before anything starts.

``+das=on`` and ``+platform=cpu`` name these Hydra callbacks in ``hydra.callbacks``. Hydra calls them with the composed
config; a setting that cannot work ends the run with one line on stderr and exit code 1.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from das_verl.config import ConfigError, DasConfig
from das_verl.history.dumps import dump_files

VERL_VERSIONS = ("0.9.1", "0.10")
VLLM_VERSIONS = ("0.24", "0.30")


def check_das(config: DictConfig) -> None:
    """Check a config composed with ``+das=on``.

    Raises
    ------
    ConfigError
        On the first setting that DAS cannot work with.
    """
    das = DasConfig.parse(dict(config.das))
    _check_version("verl", VERL_VERSIONS)
    _check_version("vllm", VLLM_VERSIONS)
    _check_plugins()
    actor_rollout = config.actor_rollout_ref
    rollout = actor_rollout.rollout
    if rollout.name != "vllm":
        raise ConfigError(f"actor_rollout_ref.rollout.name={rollout.name}: +das=on needs vllm; set it, or drop +das=on")
    if not config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=False: +das=on needs verl's V1 trainer; drop this setting")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0"):
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER is set: +das=on needs vLLM's V1 model runner; unset it")
    if rollout.full_determinism:
        raise ConfigError(
            "actor_rollout_ref.rollout.full_determinism=True is not supported with +das=on (drafts depend on timing); "
            "set it to False, or drop +das=on"
        )
    if rollout.data_parallel_size > 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.data_parallel_size={rollout.data_parallel_size} is not supported with +das=on; "
            "set it to 1 and let verl run more replicas"
        )
    mtp = actor_rollout.model.get("mtp")
    if mtp is not None and mtp.get("enable_rollout"):
        raise ConfigError(
            "actor_rollout_ref.model.mtp.enable_rollout=True drafts by multi-token prediction, and +das=on from "
            "history; choose one"
        )
    engine = rollout.engine_kwargs.vllm
    speculative = engine.get("speculative_config")
    ours = {"method": "custom_class", "model": "das_verl.vllm.proposer.Proposer"}
    if speculative is None or any(speculative.get(k) != v for k, v in ours.items()):
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config is set to another drafter; "
            "remove it, or drop +das=on"
        )
    if OmegaConf.select(engine, "additional_config.das") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config has lost its key das; "
            "add keys to it one by one (+...additional_config.KEY=VALUE) instead of replacing it"
        )
    if rollout.checkpoint_engine.backend == "delta_sharded":
        raise ConfigError(
            "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded is not supported with +das=on; "
            "set it to naive, or to nccl where trainer and rollout are separate"
        )
    if rollout.disaggregation.enabled:
        raise ConfigError(
            "actor_rollout_ref.rollout.disaggregation.enabled=True is not supported with +das=on; set it to False"
        )
    for key, needed in (
        ("router_config_path", str(Path(__file__).parent / "router.yaml")),
        ("agent.agent_loop_manager_class", "das_verl.verl.agent_loop.AgentLoopManager"),
    ):
        if OmegaConf.select(rollout, key) != needed:
            raise ConfigError(
                f"actor_rollout_ref.rollout.{key}={OmegaConf.select(rollout, key)}: +das=on needs its own; "
                "remove yours, or drop +das=on"
            )
    _check_callback(config.trainer.checkpoint_callback_class)
    if das.history.warm_start is not None and not dump_files(Path(das.history.warm_start).expanduser()):
        raise ConfigError(
            f"das.history.warm_start={das.history.warm_start} holds no rollout dump (.jsonl); "
            "set it to the trainer.rollout_data_dir of an earlier run, or to null"
        )
    _check_external_lib(config)


def check_cpu(config: DictConfig) -> None:
    """Check a config composed with ``+platform=cpu``.

    Raises
    ------
    ConfigError
        On the first setting that a CPU cannot do.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        raise ConfigError("+platform=cpu needs the environment variable VERL_PLATFORM=cpu; set it before the command")
    _check_plugins()
    needs = {
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.model.use_liger": False,
        "actor_rollout_ref.model.use_fused_kernels": False,
        "actor_rollout_ref.rollout.enable_sleep_mode": False,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.quantization": None,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "naive",
        "trainer.nnodes": 1,
        "trainer.device": "cpu",
        "reward.reward_model.enable": False,
    }
    for key, needed in needs.items():
        value = OmegaConf.select(config, key)
        if value != needed:
            raise ConfigError(f"{key}={value} cannot run on a CPU; it must be {needed}")
    for key in ("lora_rank", "lora.rank"):
        if (OmegaConf.select(config.actor_rollout_ref.model, key) or 0) > 0:
            raise ConfigError(f"actor_rollout_ref.model.{key} cannot be used on a CPU; set it to 0")
    if config.algorithm.adv_estimator == "gae":
        raise ConfigError("algorithm.adv_estimator=gae trains a critic, which cannot run on a CPU; use grpo")
    _check_external_lib(config)


def check_inputs(config: DictConfig) -> None:
    """Check that the model and the data that a run names are there.

    verl finds out in a worker, minutes later, with a traceback of several processes.

    Raises
    ------
    ConfigError
        On a local path that is missing, or a file without prompts.
    """
    path = str(config.actor_rollout_ref.model.path)
    local = Path(path).expanduser()
    if path.startswith(("/", "~", ".")) and not (local / "config.json").is_file():
        raise ConfigError(f"actor_rollout_ref.model.path={path} holds no model (no config.json there)")
    for name in ("train_files", "val_files"):
        files = config.data[name]
        for file in [files] if isinstance(files, str) else files:
            _check_prompts(f"data.{name}", str(file), config.data.prompt_key)


def _check_prompts(setting: str, file: str, prompt_key: str) -> None:
    local = Path(file).expanduser()
    if "://" in file or local.suffix != ".parquet":
        return
    if not local.is_file():
        raise ConfigError(f"{setting}={file} does not exist")
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(local)
    except pyarrow.ArrowInvalid:
        raise ConfigError(f"{setting}={file} is not a parquet file") from None
    if prompt_key not in parquet.schema_arrow.names:
        raise ConfigError(f"{setting}={file} has no column {prompt_key!r}; data.prompt_key names the prompts' column")
    if parquet.metadata.num_rows == 0:
        raise ConfigError(f"{setting}={file} holds no prompts")


def _check_version(package: str, supported: tuple[str, str]) -> None:
    low, high = supported
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{package} is not installed; +das=on needs {package}>={low},<{high}") from None
    if not Version(low) <= Version(found.split("+")[0]) < Version(high):
        raise ConfigError(f"{package} {found} is not supported; install {package}>={low},<{high}, or drop +das=on")


def _check_plugins() -> None:
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "das_verl" not in {name.strip() for name in policy.split(",")}:
        raise ConfigError(f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading das-verl; add das_verl to it")


def _check_callback(path: str | None) -> None:
    name = "das_verl.verl.checkpoint.SaveHistory"
    try:
        derived = path is not None and issubclass(get_class(path), get_class(name))
    except Exception as error:  # whatever importing a class of the user's raises
        raise ConfigError(
            f"trainer.checkpoint_callback_class={path} cannot be loaded: {' '.join(str(error).split())}"
        ) from None
    if not derived:
        raise ConfigError(
            f"trainer.checkpoint_callback_class={path}: +das=on saves its history there; "
            f"derive your class from {name}, or drop the setting"
        )


def _check_external_lib(config: DictConfig) -> None:
    libs = config.actor_rollout_ref.model.external_lib
    libs = [libs] if isinstance(libs, str) else list(libs or [])
    if "das_verl.verl.register" not in libs:
        needed = ",".join(["das_verl.verl.register", *libs])
        raise ConfigError(f"actor_rollout_ref.model.external_lib drops das-verl; set it to [{needed}]")


class CheckConfig(Callback):
    """Hydra callback of ``+das=on``."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Stop the run if the config cannot work."""
        _stop_on_error(config, check_das, check_inputs)


class CheckPlatform(Callback):
    """Hydra callback of ``+platform=cpu``."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Stop the run if the config cannot work on a CPU."""
        _stop_on_error(config, check_cpu, check_inputs)


def _stop_on_error(config: DictConfig, *checks: Any) -> None:
    # Hydra turns an exception of a callback into a warning; SystemExit passes.
    try:
        for check in checks:
            check(config)
    except ConfigError as error:
        raise SystemExit(f"das-verl: {error}") from None
