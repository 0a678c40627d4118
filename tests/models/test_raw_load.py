"""Memory that an equal rank sends is taken whole, and nothing else is."""

import pytest
import torch

from rollout.errors import WeightMismatch
from rollout.models.weight_io.raw_load import RawLoad, raw_bytes, raw_name
from rollout.weights import Box, TensorPiece

SOURCE = {"q": torch.arange(6, dtype=torch.float32).view(2, 3), "s": torch.ones(2)}


def load():
    into = {name: torch.zeros_like(tensor) for name, tensor in SOURCE.items()}
    derived: list[bool] = []
    return RawLoad(into, 1, lambda: derived.append(True)), into, derived


def pieces(rank, name):
    raw = raw_bytes(SOURCE[name])
    for start in range(0, raw.numel(), 5):
        box = Box((start,), (min(start + 5, raw.numel()),))
        yield raw_name(rank, name), TensorPiece(tuple(raw.shape), raw.dtype, box, raw[box.slices])


def test_the_memory_of_its_own_rank_is_taken_byte_for_byte() -> None:
    found, into, derived = load()
    for rank in (0, 1):  # the first one's is passed over
        for name in SOURCE:
            found.feed(pieces(rank, name))
    assert found.finish().nbytes == 32
    assert all(torch.equal(into[name], tensor) for name, tensor in SOURCE.items())
    assert derived == [True]


def test_what_is_missing_or_comes_twice_is_named() -> None:
    found, _, derived = load()
    found.feed(pieces(1, "q"))
    with pytest.raises(WeightMismatch, match="not every byte came once of raw/1/s"):
        found.finish()
    found.feed([*pieces(1, "s"), *pieces(1, "s")])
    with pytest.raises(WeightMismatch, match="raw/1/s"):
        found.finish()
    assert derived == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("raw/1/k", torch.zeros(24, dtype=torch.uint8)),
        ("raw/1/q", torch.zeros(25, dtype=torch.uint8)),
        ("raw/1/q", torch.zeros(24, dtype=torch.int8)),
        ("model.norm.weight", torch.zeros(24, dtype=torch.uint8)),
    ],
)
def test_what_an_equal_rank_has_not_is_refused_by_name(name, value) -> None:
    found, _, _ = load()
    with pytest.raises(WeightMismatch, match=name):
        found.feed([(name, value)])
