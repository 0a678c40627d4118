"""Components of one update: the policy, and models and adapters that are served beside it.

A tensor of another component than the policy is called ``component:name`` wherever a tensor has a
name: in metadata, buckets, plans, digests. One begin, seal, vote and commit is about all of them.
An adapter is the component ``adapter/NAME``; a model's component has no "/" in its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rollout.errors import ConfigError, WeightMismatch, some

POLICY = "policy"
_MARK = ":"  # in no file's name of a tensor
_ADAPTER = "adapter/"
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,255}")


def qualified(component: str, name: str) -> str:
    """What ``name`` of ``component`` is called in an update."""
    return name if component == POLICY else f"{component}{_MARK}{name}"


def component_of(name: str) -> str:
    """The component that a tensor of an update belongs to."""
    return name.partition(_MARK)[0] if _MARK in name else POLICY


def adapter_component(name: str) -> str:
    """The component of the adapter of this name; ``ConfigError`` where it cannot name one."""
    if not _ADAPTER_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.80} cannot name an adapter: 1 to 256 letters, digits, _ . - and /, a letter "
            "or digit first"
        )
    return _ADAPTER + name


def adapter_of(component: str) -> str | None:
    """The adapter that a component is; None of a model."""
    return component.removeprefix(_ADAPTER) if component.startswith(_ADAPTER) else None


def own_name(name: str) -> str:
    """``qualified`` undone: what its component calls a tensor of an update."""
    return name.partition(_MARK)[2] or name


def qualified_names(component: str, names: Mapping[str, str]) -> dict[str, str]:
    """A table of names (aliases, prefixes) as an update has it; "" stays ""."""
    return {
        qualified(component, name): qualified(component, other) if other else other
        for name, other in names.items()
    }


def own_names(component: str, names: Mapping[str, str]) -> dict[str, str]:
    """Those of a table that ``qualified_names`` made which are ``component``'s, under its names;
    what is another's is none of its own ("").
    """
    return {
        own_name(name): own_name(other) if component_of(other) == component else ""
        for name, other in names.items()
        if component_of(name) == component
    }


def check_components(sent: Iterable[str], known: Sequence[str]) -> None:
    """``WeightMismatch`` that names the components that an engine of ``known`` ones has not."""
    sent = list(dict.fromkeys(sent))
    absent = [component for component in sent if component not in known]
    if absent:
        # None that is here: most likely the policy, under a name of the trainer's.
        policy = f"if {absent[0]!r} is the policy, pass it by itself or name it {POLICY!r}; "
        raise WeightMismatch(
            f"the engine has no component {some(list(map(repr, absent)))}: it has "
            f"{', '.join(known)}; {policy if absent == sent else ''}leave the others out, or start "
            "it with components="
        )
