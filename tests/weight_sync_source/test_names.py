"""A module's weights are found as torch would name them, in less time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rollout.weight_sync.trainer.sources.names import named_weights


class Odd(nn.Linear):
    """Says itself what its parameters are called."""

    def named_parameters(self, prefix: str = "", *args: Any, **options: Any) -> Iterator[Any]:
        for name, parameter in super().named_parameters(prefix, *args, **options):
            yield name.replace("weight", "kernel"), parameter


class Net(nn.Module):
    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_parameter("nothing", None)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        shared = nn.Linear(2, 2)
        self.layers = nn.ModuleList([shared, nn.Sequential(nn.Linear(2, 3), shared), nn.ReLU()])
        self.absent: nn.Module | None
        self.register_module("absent", None)
        self.head = (Odd if odd else nn.Linear)(2, 4, bias=False)
        self.tied = nn.Linear(2, 4, bias=False)
        self.tied.weight = self.head.weight


def _expected(module: nn.Module) -> list[tuple[str, Tensor]]:
    """By torch alone: module by module, parameters before buffers, each tensor once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, owner in module.named_modules():
        own = [*owner.named_parameters(prefix, recurse=False)]
        own += [
            (name, buffer)
            for name, buffer in owner.named_buffers(prefix, recurse=False)
            if name.rsplit(".", 1)[-1] not in owner._non_persistent_buffers_set
        ]
        for name, tensor in own:
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def test_weights_have_torchs_names_and_order() -> None:
    for odd in (False, True):
        net = Net(odd)
        ours, theirs = named_weights(net), _expected(net)
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))
        names = [name for name, _ in ours]
        assert ("head.kernel" if odd else "head.weight") in names
        assert not {"table", "nothing", "tied.weight", "layers.1.1.weight"} & {*names}
