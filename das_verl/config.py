"""The ``das:`` section of a verl config: its fields, their ranges, and what does not go together with it.

The defaults and what each key means to a user stand in ``configs/das/on.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot work, in one line: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class HistoryConfig:
    """The ``das.history:`` section."""

    gb: float
    warm_start: str | None


@dataclass(frozen=True)
class ClassesConfig:
    """The ``das.classes:`` section."""

    medium: float
    long: float
    medium_draft: int
    long_draft: int


@dataclass(frozen=True)
class DasConfig:
    """The ``das:`` section. See ``configs/das/on.yaml`` for what each field means."""

    window: int
    max_draft: int
    verify_tokens: int | None
    policy: str
    classes: ClassesConfig
    draft_sizes: list[int] | None
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
        if kind in _SECTIONS:
            value = _parse(_SECTIONS[kind], value, key)
        elif kind == "str":
            if value not in _CHOICES[key]:
                raise ConfigError(f"{key}={value!r} must be one of {', '.join(_CHOICES[key])}")
        elif kind == "str | None":
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{key}={value!r} must be a path, or null")
        elif kind.startswith("list"):
            if value is not None and not _are_sizes(value):
                raise ConfigError(f"{key}={value!r} must be rising whole numbers above 0, as in [1,3,7], or null")
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


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        and all(a < b for a, b in pairwise([0, *value]))
    )


_SECTIONS: dict[str, Any] = {"HistoryConfig": HistoryConfig, "ClassesConfig": ClassesConfig}
_CHOICES = {"das.policy": ("solved", "classes")}
# 128 is the most draft tokens that vLLM's rejection sampler takes for a request (MAX_SPEC_LEN).
_RANGES: dict[str, tuple[float, float]] = {
    "das.window": (1, 4096),
    "das.max_draft": (1, 128),
    "das.verify_tokens": (1, 1 << 20),
    "das.classes.medium": (0, 1 << 20),
    "das.classes.long": (0, 1 << 20),
    "das.classes.medium_draft": (0, 128),
    "das.classes.long_draft": (0, 128),
    "das.prompt_tail": (0, 4096),
    "das.history.gb": (1e-6, 1e4),
    "das.tree_gb": (1e-6, 1e4),
    "das.build_threads": (1, 256),
}
