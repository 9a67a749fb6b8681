"""The ``das:`` section of a verl config: its fields, their ranges, and what does not go together with it.

The defaults and what each key means to a user stand in ``configs/das/on.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot work, in one line: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class HistoryConfig:
    """The ``das.history:`` section."""

    gb: float
    warm_start: str | None


@dataclass(frozen=True)
class DasConfig:
    """The ``das:`` section. See ``configs/das/on.yaml`` for what each field means."""

    window: int
    max_draft: int
    verify_tokens: int | None
    prompt_tail: int
    history: HistoryConfig
    tree_gb: float
    build_threads: int

    @classmethod
    def parse(cls, section: Mapping[str, Any]) -> DasConfig:
        """Check a ``das:`` section and return it.

        Parameters
        ----------
        section : mapping
            Every field of this class, and nothing else.

        Raises
        ------
        ConfigError
            On an unknown or missing key, a wrong type or a value out of range.
        """
        return _parse(cls, section, "das")


def _parse(cls: Any, section: Mapping[str, Any], prefix: str) -> Any:
    known = {f.name: f.type for f in fields(cls)}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{prefix}={section!r} must be a section with the settings {', '.join(known)}")
    for key in section:
        if key not in known:
            raise ConfigError(f"{prefix}.{key} is not a setting; the settings are {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, kind in known.items():
        key = f"{prefix}.{name}"
        if name not in section:
            raise ConfigError(f"{key} is missing; start from +das=on, which sets every key")
        value = section[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if kind == "HistoryConfig":
            value = _parse(HistoryConfig, value, key)
        elif kind == "str | None":
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{key}={value!r} must be a path, or null")
        elif kind == "int | None" and value is None:
            pass
        elif kind.startswith("int") and not whole:
            raise ConfigError(f"{key}={value!r} must be a whole number")
        elif not (whole or isinstance(value, float)):
            raise ConfigError(f"{key}={value!r} must be a number")
        else:
            low, high = _RANGES[key]
            if not low <= value <= high:
                raise ConfigError(f"{key}={value} is out of range; it must lie in [{low}, {high}]")
        values[name] = value
    return cls(**values)


# 128 is the most draft tokens that vLLM's rejection sampler takes for a request (MAX_SPEC_LEN).
_RANGES: dict[str, tuple[float, float]] = {
    "das.window": (1, 4096),
    "das.max_draft": (1, 128),
    "das.verify_tokens": (1, 1 << 20),
    "das.prompt_tail": (0, 4096),
    "das.history.gb": (1e-6, 1e4),
    "das.tree_gb": (1e-6, 1e4),
    "das.build_threads": (1, 256),
}
