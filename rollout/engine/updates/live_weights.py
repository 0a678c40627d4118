"""An engine's live weights as a source: what a member of a fleet sends to one that joins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout.engine.core import EngineCore
from rollout.engine.executors import gather_replies
from rollout.engine.updates.coordinator import Coordinator
from rollout.errors import VersionConflict
from rollout.loader.peft_adapter import PeftAdapter
from rollout.weight_sync.protocol.adapters import adapter_tensors
from rollout.weights import Box, TensorMeta
from rollout.weights.components import own_name
from rollout.wire.codec import to_plain

_AT_ONCE = 64 << 20  # bytes that the ranks are asked for


def live_weights(
    engine: EngineCore, metadata: Sequence[TensorMeta], timeout: float
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor on the CPU), in file form and the engine's dtype, of one version.

    Bounded by 64 MiB or the largest tensor at a time; the caller sees to it that nothing commits
    meanwhile (``Turn.reading``), else ``VersionConflict``.
    """
    version = engine.base_version  # the ranks' own
    for group in _groups(metadata):
        args = {"names": [meta.name for meta in group]}
        replies = gather_replies(engine.call("stage_read", args), "read", timeout)
        if any(reply["version"] != version for reply, _ in replies):
            raise VersionConflict("the weights changed while they were read")
        tensors = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in group}
        for reply, values in replies:
            _place(reply["boxes"], values, tensors)
        yield from tensors.items()


def live_adapters(
    coordinator: Coordinator, names: Iterable[str], timeout: float
) -> dict[str, PeftAdapter]:
    """The newest version of each of these adapters, on the CPU, in the engine's dtype; for the
    holder of the lease.
    """
    updates, found = coordinator.adapters, {}
    for name in names:
        version = updates.newest[name]
        spec = updates.kept(version).spec
        args = {"slot": version.slot, "spec": to_plain(spec)}
        asked = coordinator.engine.call("stage_read_adapter", args)
        replies = gather_replies(asked, "read", timeout)
        metas = adapter_tensors(name, spec, coordinator.served.wanted)
        tensors = {own_name(m.name): torch.empty(m.shape, dtype=m.dtype) for m in metas}
        for reply, values in replies:
            _place(reply["boxes"], values, tensors)
        found[name] = PeftAdapter(spec, tensors)
    return found


def _place(
    boxes: Sequence[Any], values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    for index, (name, starts, stops) in enumerate(boxes):
        box = Box(tuple(starts), tuple(stops))
        tensors[name][box.slices].copy_(values[str(index)].view(box.shape))


def _groups(metadata: Sequence[TensorMeta]) -> Iterator[list[TensorMeta]]:
    group: list[TensorMeta] = []
    size = 0
    for meta in metadata:
        if group and size + meta.nbytes > _AT_ONCE:
            yield group
            group, size = [], 0
        group.append(meta)
        size += meta.nbytes
    if group:
        yield group
