"""Code that lies with a checkpoint: named by its ``auto_map``, imported only if it was allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError

MODEL, CONFIG = "AutoModelForCausalLM", "AutoConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCode:
    """Leave to import the code of the checkpoint in ``directory``.

    ``revision``: of code that another hub id's ``auto_map`` entry ("owner/name--file.Class") names.
    """

    directory: str
    revision: str | None = None

    def classes(self, values: Mapping[str, Any]) -> tuple[type[Any], type[Any]]:
        """The model's class and its config's; runs the checkpoint's code."""
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        found = []
        for part in (MODEL, CONFIG):
            name = auto_map(values).get(part)
            if name is None:
                raise ConfigError(f"{self.directory}: its auto_map names no {part}")
            file = Path(self.directory, f"{name.partition('.')[0]}.py")
            if "--" not in name and not file.is_file():
                raise ConfigError(
                    f"{self.directory}: its auto_map names {name}, and there is no {file.name}: "
                    "copy it there, or fetch the model anew while the hub can be reached"
                )
            try:
                found.append(
                    get_class_from_dynamic_module(name, self.directory, code_revision=self.revision)
                )
            except Exception as error:  # whatever its code raises
                raise ConfigError(
                    f"{self.directory}: its code {name} cannot be imported: "
                    f"{type(error).__name__}: {str(error)[:300]}"
                ) from error
        return found[0], found[1]


def auto_map(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Which classes of its own a checkpoint's config names; empty for most."""
    found = values.get("auto_map")
    return found if isinstance(found, Mapping) else {}
