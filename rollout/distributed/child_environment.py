"""The environment of the processes that this package starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_OF_THE_HUB = frozenset(
    {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN"}
)


def child_environment(
    settings: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Ours without tokens, with this package importable, and with ``settings``.

    ``defaults`` hold where ours says nothing. Neither the servers' tokens nor the hub's are of any
    use to a rank, and whoever can look at a process sees its environment.
    """
    env = {name: value for name, value in os.environ.items() if not _is_token(name)}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    return {**(defaults or {}), **env, **settings}


def hub_tokens() -> dict[str, str]:
    """Those of this environment: settings of a child that fetches its model itself."""
    return {name: value for name, value in os.environ.items() if name in _OF_THE_HUB}


def _is_token(name: str) -> bool:
    return name in _OF_THE_HUB or (name.startswith("ROLLOUT_") and "TOKEN" in name.split("_"))
