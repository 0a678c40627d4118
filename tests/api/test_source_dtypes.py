"""Another float dtype than the engine's is cast on any transport; quantised values are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.versions.reader import VersionSource
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter
from rollout.weights import Box, TensorMeta

NAME = "model.norm.weight"
TRANSPORTS = ("inline", "grpc_stream", "broadcast", "ipc", "p2p")
BF16 = torch.bfloat16


class Held:
    """A trainer's own ``WeightSource``, which sends what it holds in its own dtype."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.agreement = state, Agreement()

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self.state.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.state.items()

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(name, [Box.full(tuple(t.shape))]) for name, t in self.state.items()]

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        return [(Box.full(tuple(self.state[name].shape)), self.state[name])]


@pytest.fixture(scope="module")
def halves(other_weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(BF16) for name, tensor in other_weights.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_in_bfloat16_is_cast_for_an_engine_in_float32(
    client: Any, halves: dict[str, Tensor], transport: str
) -> None:
    assert client.weight_info().dtype == torch.float32
    moved = {name: tensor + TRANSPORTS.index(transport) for name, tensor in halves.items()}
    receipt = client.update_weights(Held(moved), transport=transport, timeout=10)
    assert receipt.transport == transport
    assert client.preflight(Held(moved)).equal
    assert client.check_weights(Held(moved)).equal
    assert client.check_weights({n: t.float() for n, t in moved.items()}).equal


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("form", [dict, Held, lambda state: iter(state.items())])
def test_quantised_values_are_refused_with_both_dtypes(
    client: Any, halves: dict[str, Tensor], transport: str, dtype: torch.dtype, form: Any
) -> None:
    state, live = {**halves, NAME: halves[NAME].to(dtype)}, client.weight_version
    with pytest.raises(WeightMismatch, match=rf"{NAME} has dtype {dtype}.*torch.float32.*dequant"):
        client.update_weights(form(state), transport=transport, timeout=10)
    assert client.weight_version == live


def test_preflight_and_the_check_say_so_too(client: Any, halves: dict[str, Tensor]) -> None:
    state = {**halves, NAME: halves[NAME].to(torch.float8_e5m2)}
    [problem] = client.preflight(state).problems
    assert NAME in problem
    assert "float8_e5m2" in problem
    with pytest.raises(WeightMismatch, match="float8_e5m2"):
        client.check_weights(state)


def test_a_version_on_disk_is_cast_and_refused_in_the_same_way(
    client: Any, halves: dict[str, Tensor], tmp_path: Any
) -> None:
    store = LocalStore(tmp_path)
    writer = VersionWriter(store, dtype=torch.float32)
    manifest = writer.write(Held(halves), 3)
    assert manifest is not None
    assert {meta.dtype for meta in manifest.tensors} == {torch.float32}
    client.update_weights(VersionSource(store, 3), timeout=10)
    assert client.check_weights(Held(halves)).equal
    with pytest.raises(WeightMismatch, match=f"{NAME}.*float8_e4m3fn"):
        writer.write({**halves, NAME: halves[NAME].to(torch.float8_e4m3fn)}, 4)
