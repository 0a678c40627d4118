"""Typed reads of a ``config.json`` whose errors name the field and the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.models.arch import Scale, Switch
from rollout.wire.frames import dtype_from_name

MOST = 1 << 31  # of what is counted; and of what there is a row for here
MOST_ROWS = {"num_hidden_layers": 10_000}
LARGEST = 3.4e38  # of numbers: a float32's
DTYPES = ("float32", "bfloat16", "float16", "float64")


class Reader:
    """Typed reads of one config dict whose errors name the field and the file.

    ``called``: what the file calls fields that have another name here.
    """

    def __init__(
        self, values: Mapping[str, Any], file: str, called: Mapping[str, str] | None = None
    ) -> None:
        self.values, self.file = values, file
        self._called = called or {}

    def wrong(self, name: str, kind: str, value: Any) -> ConfigError:
        """That ``name`` must be ``kind``."""
        called = self._called.get(name, name)
        return ConfigError(f"{self.file}: {called} must be {kind}, got {shown(value)}")

    def required(self, name: str) -> Any:
        value = self.values.get(name)
        if value is None:
            called = self._called.get(name, name)
            raise ConfigError(f"{self.file}: field {called!r} is missing; the model needs it")
        return value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(name)
        value = default if value is None and default is not None else self.required(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least else "an integer, 0 or more"
            raise self.wrong(name, kind, value)
        if value > (most := MOST_ROWS.get(name, MOST)):
            raise self.wrong(name, f"at most {most}", value)
        return value

    def number(self, name: str, above: float | None = None) -> float:
        """A finite one, above ``above``."""
        value = self.required(name)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not -LARGEST <= value <= LARGEST or (above is not None and value <= above):
            kind = "a number" if above is None else f"a number above {above:g}"
            raise self.wrong(name, kind, value)
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
            raise self.wrong(str(name), f"{count} numbers", value)
        return tuple(Reader({str(name): one}, self.file).number(str(name)) for one in value)

    def scale(self, scale: Scale | None, otherwise: float = 1.0) -> float:
        """A factor that an architecture declares; ``otherwise`` where it declares none."""
        if scale is None:
            return otherwise
        value = scale.default if self.values.get(scale.field) is None else None
        value = self.number(scale.field) if value is None else value
        if value <= 0:
            raise ConfigError(f"{self.file}: {scale.field} must be above 0, got {value}")
        return float(value**scale.power)

    def softcap(self, cap: tuple[str, float | None] | None) -> float:
        """(field, default) that an architecture declares; 0: none, as where the file has null."""
        if cap is None or self.values.get(cap[0], cap[1]) is None:
            return 0.0
        return self.number(cap[0]) if cap[0] in self.values else float(cap[1] or 0)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Empty where the file has none."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object", value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return default if value is None else value

    def switch(self, switch: Switch) -> bool:
        return switch if isinstance(switch, bool) else self.flag(*switch)

    def names(self, name: str) -> list[str]:
        value = self.required(name)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.wrong(name, "a list of names", value)
        return value

    def dtype(self) -> torch.dtype:
        """What the weights are in; of a file that is mute float32, and bfloat16 where they are
        quantised: gpt-oss and MiniMax-M2 say nothing of what is not."""
        otherwise = "bfloat16" if self.values.get("quantization_config") else "float32"
        field = "dtype" if self.values.get("dtype") else "torch_dtype"
        value = self.values.get(field) or otherwise
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise ConfigError(
                f"{self.file}: {field} {shown(value)} is not one of {', '.join(DTYPES)}"
            )
        return dtype_from_name(name)


def shown(value: Any) -> str:
    """``value`` as an error shows it, however large it is."""
    if isinstance(value, int) and abs(value) > 10**18:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.100}"


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file holds; ``ConfigError`` where it holds none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} does not exist; point `model` at a checkpoint directory"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return values
