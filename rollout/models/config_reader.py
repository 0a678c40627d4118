"""Typed reads of a ``config.json`` whose errors name the field and the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.models.arch import Switch
from rollout.wire.frames import dtype_from_name

DTYPES = ("float32", "bfloat16", "float16", "float64")


class Reader:
    """Typed reads of one config dict whose errors name the field and the file."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values, self.file = values, file

    def required(self, name: str) -> Any:
        value = self.values.get(name)
        if value is None:
            raise ConfigError(f"{self.file}: field {name!r} is missing; the model needs it")
        return value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(name)
        value = default if value is None and default is not None else self.required(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least else "an integer, 0 or more"
            raise ConfigError(f"{self.file}: {name} must be {kind}, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.required(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{self.file}: {name} must be a number, got {value!r}")
        return float(value)

    def factor(self, name: str | None) -> float:
        """1 where the file has none."""
        known = name is not None and self.values.get(name) is not None
        return self.number(name) if name is not None and known else 1.0

    def factors(self, name: str | None, count: int) -> tuple[float, ...]:
        """A list of that many, ones where the file has none."""
        value = None if name is None else self.values.get(name)
        if value is None:
            return (1.0,) * count
        if not isinstance(value, list) or len(value) != count:
            raise ConfigError(f"{self.file}: {name} must be {count} numbers, got {value!r}")
        return tuple(Reader({str(name): one}, self.file).number(str(name)) for one in value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Empty where the file has none."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.file}: {name} must be an object, got {value!r}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.file}: {name} must be true or false, got {value!r}")
        return default if value is None else value

    def switch(self, switch: Switch) -> bool:
        return switch if isinstance(switch, bool) else self.flag(*switch)

    def names(self, name: str) -> list[str]:
        value = self.required(name)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"{self.file}: {name} must be a list of names, got {value!r}")
        return value

    def dtype(self) -> torch.dtype:
        value = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise ConfigError(f"{self.file}: dtype {value!r} is not one of {', '.join(DTYPES)}")
        return dtype_from_name(name)
