"""``load_format="fastsafetensors"`` of quantised files, by a stand-in for the package whose files
overwrite what they gave out when they are closed, as its buffers are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packed_files import CONFIGS, packed
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.loader import open_checkpoint
from rollout.weights import Box


class OpenFile:
    def __init__(self, path: str) -> None:
        self._held = {name: value.clone() for name, value in load_file(path).items()}

    def get_tensor(self, name: str) -> Tensor:
        return self._held[name]

    def __exit__(self, *exc: object) -> None:
        for value in self._held.values():
            value.view(torch.uint8).fill_(0x35)


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The files that were opened, in order."""
    names: list[str] = []

    def fastsafe_open(paths: list[str], *, nogds: bool, device: str) -> OpenFile:
        assert (nogds, device) == (True, "cpu")
        [path] = paths
        names.append(Path(path).name)
        return OpenFile(path)

    package = ModuleType("fastsafetensors")
    package.fastsafe_open = fastsafe_open
    monkeypatch.setitem(sys.modules, "fastsafetensors", package)
    return names


def made(kind: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors of a quantised weight in the order of their names, and what the config says."""
    generator = torch.Generator().manual_seed(3)
    if kind == "mxfp4":
        blocks = torch.randint(0, 256, (3, 5, 4, 16), generator=generator)
        scales = torch.randint(100, 140, (3, 5, 4), generator=generator)
        return {"a_blocks": blocks.to(torch.uint8), "a_scales": scales.to(torch.uint8)}, {}
    if kind == "fp8":
        codes = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
        config: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        return {
            "a.weight": codes,
            "a.weight_scale_inv": torch.rand(2, 3, generator=generator),
        }, config
    tensors, _ = packed(kind, "a", (48, 80), generator)
    tensors["a.scales"] = tensors["a.scales"].float()  # 32 bits, so that no cast makes a copy
    return {name: tensors[name].contiguous() for name in sorted(tensors)}, CONFIGS[kind]


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "gptq"])
def test_what_belongs_together_may_lie_in_several_files(
    tmp_path, monkeypatch, opened, kind, shards
):
    """A quantised weight whose bands are put together of tensors that no single file has."""
    monkeypatch.setattr("rollout.weights.files.packed_int._BAND", 1 << 10)
    tensors, config = made(kind)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    names = list(tensors)
    parts = [part for i in range(shards) if (part := names[i::shards])]
    for number, part in enumerate(parts):
        save_file({n: tensors[n] for n in part}, tmp_path / f"model-{number}.safetensors")

    def read(load_format: str) -> dict[str, list[Tensor]]:
        found = {}
        with open_checkpoint(str(tmp_path), load_format=load_format) as checkpoint:
            for name, lazy in checkpoint.items():
                whole = Box.full(lazy.shape)
                found[name] = [lazy.read(whole)]
                found[name] += [part for held in lazy.codes for part in held.read(whole)]
        return found

    wanted, found = read("safetensors"), read("fastsafetensors")
    assert wanted.keys() == found.keys()
    for name, values in wanted.items():
        for want, have in zip(values, found[name], strict=True):
            assert torch.equal(have.float(), want.float())
    if len(parts) == 2:
        assert sorted(opened) == ["model-0.safetensors", "model-1.safetensors"]  # each once


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "gptq", "gptq_v2", "awq"])
def test_unpacking_goes_on_the_device_of_what_was_read(tmp_path, kind):
    """Here a CPU, whatever the device of new tensors is: helpers of another cannot be combined."""
    tensors, config = made(kind)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(str(tmp_path)) as checkpoint:
        for _, lazy in checkpoint.items():
            wanted = lazy.read(Box.full(lazy.shape)).clone()
            with torch.device("meta"):
                found = lazy.read(Box.full(lazy.shape))
            assert torch.equal(found, wanted)
