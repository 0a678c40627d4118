"""Python files and modules of users, which a setting names."""

from __future__ import annotations

import hashlib
import sys
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

from rollout.errors import ConfigError


def imported(where: str, setting: str) -> ModuleType:
    """The module that ``setting`` names, or the one that a ``.py`` file makes, once a process.

    ``ConfigError`` where it is not there, or raises.
    """
    path = Path(where).expanduser()
    try:
        if path.suffix != ".py":
            return import_module(where)
        resolved = path.resolve()
        name = f"rollout_user_module_{hashlib.sha256(str(resolved).encode()).hexdigest()[:16]}"
        if name not in sys.modules:
            spec = util.spec_from_file_location(name, resolved)
            assert spec is not None
            assert spec.loader is not None
            module = util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"{setting} {where} cannot be imported: {type(error).__name__}: {error}"
        ) from error
