"""Checkpoints in fp8 with scales by block, as DeepSeek, Qwen and others release them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import write_tiny

from rollout import Rollout
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, SourceFailed
from rollout.loader import open_checkpoint
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.weights import Box

NAME = "model.layers.0.mlp.gate_proj.weight"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def in_blocks(weight: torch.Tensor, size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's float8 codes and the float32 scales of its blocks, block by block."""
    rows, columns = (-(-n // size) for n in weight.shape)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scales[i, j] = weight[at].abs().max() / 448 + 1e-9
            codes[at] = (weight[at] / scales[i, j]).to(codes.dtype)
    return codes, scales


def whole(codes: torch.Tensor, scales: torch.Tensor, size: int = 128) -> torch.Tensor:
    values = codes.float()
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            values[i * size : (i + 1) * size, j * size : (j + 1) * size] *= scales[i, j]
    return values


def write(path, tensors, packed=BLOCKS):
    (path / "config.json").write_text(json.dumps({"quantization_config": packed}))
    save_file(tensors, path / "model.safetensors")


def test_a_box_of_an_fp8_weight_is_that_box_of_the_whole_tensor_dequantised(tmp_path):
    generator = torch.Generator().manual_seed(3)
    codes, scales = in_blocks(torch.randn(200, 300, generator=generator))
    norm = torch.ones(7, dtype=torch.bfloat16)
    write(tmp_path, {NAME: codes, f"{NAME}_scale_inv": scales, "model.norm.weight": norm})
    wanted = whole(codes, scales)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        found = dict(checkpoint.items())
        assert set(found) == {NAME, "model.norm.weight"}
        assert (found[NAME].shape, found[NAME].dtype) == ((200, 300), torch.float32)
        boxes = [((0, 0), (200, 300)), ((127, 255), (129, 257)), ((130, 3), (131, 290))]
        for box in (Box(*ends) for ends in [*boxes, ((5, 5), (5, 9))]):
            assert torch.equal(found[NAME].read(box), wanted[box.slices])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (6, 1)])
@pytest.mark.parametrize("said", [{"quant_method": "fp8", "weight_block_size": None}, None])
def test_scales_of_whole_tensors_and_of_rows_are_read(tmp_path, shape, kind, said):
    """Also where the config says nothing of them, as of a trainer's own files."""
    codes = torch.linspace(-3, 3, 24).view(6, 4).to(torch.float8_e4m3fn)
    scale = torch.rand(shape).to(kind)
    inputs = NAME.replace(".weight", ".activation_scale")
    tensors = {NAME: codes, f"{NAME}_scale": scale, inputs: torch.ones(())}
    write(tmp_path, tensors, said)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        ((name, lazy),) = checkpoint.items()
        box = Box((1, 1), (4, 3))
        wanted = (codes.float() * scale.float())[box.slices]
        assert name == NAME
        assert torch.equal(lazy.read(box), wanted)


def test_fp8_weights_with_missing_or_misshapen_scales_are_named(tmp_path):
    codes, scales = in_blocks(torch.ones(130, 4))
    write(tmp_path, {NAME: codes})
    with pytest.raises(ConfigError, match=rf"{NAME}.* needs {NAME}_scale_inv.*there is none"):
        open_checkpoint(str(tmp_path))
    write(tmp_path, {NAME: codes, f"{NAME}_scale_inv": scales[:1].clone()})
    with pytest.raises(ConfigError, match=r"of shape \(2, 1\).*_scale_inv is .*\(1, 1\)"):
        open_checkpoint(str(tmp_path))
    write(tmp_path, {NAME: codes}, {"quant_method": "fp8", "weight_block_size": 128})
    with pytest.raises(ConfigError, match="weight_block_size must be two positive integers"):
        open_checkpoint(str(tmp_path))


def test_int8_of_bitsandbytes_is_named_as_what_it_is(tmp_path):
    codes, scales = torch.ones(8, 4, dtype=torch.int8), torch.ones(8)
    tensors = {NAME: codes, NAME.replace("weight", "SCB"): scales}
    for packed in ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None):
        write(tmp_path, tensors, packed)
        with pytest.raises(ConfigError, match=r"is bitsandbytes' int8.*use an unquantised"):
            open_checkpoint(str(tmp_path))


def test_an_fp8_release_starts_and_updates_as_its_dequantised_weights(tmp_path):
    wanted = write_release(tmp_path, "qwen3_moe", size=16)
    config = ModelConfig.from_directory(tmp_path)
    for rank in range(2):
        two = [build_model(config, TensorParallel(rank, 2), torch.bfloat16, "cpu") for _ in "12"]
        with open_checkpoint(str(tmp_path)) as checkpoint:
            two[0].load_weights(checkpoint.items())
        two[1].load_weights(wanted.items())
        for one, other in zip(two[0].parameters(), two[1].parameters(), strict=True):
            assert torch.equal(one, other)
    with Rollout(str(tmp_path), device="cpu", dtype="bfloat16", max_model_len=32) as engine:
        assert not engine.check_weights(wanted).differing
        engine.update_weights({name: tensor * 2 for name, tensor in wanted.items()})
        assert engine.check_weights(wanted).differing
        engine.update_weights(str(tmp_path))
        assert not engine.check_weights(wanted).differing
        (tmp_path / "config.json").unlink()
        with pytest.raises(SourceFailed, match=r"needs .*_scale_inv"):
            engine.update_weights(str(tmp_path))


def write_release(path, kind: str, size: int) -> dict[str, torch.Tensor]:
    """A tiny model's directory with its linears in fp8; what these stand for, in bfloat16."""
    write_tiny(path, kind)
    files, wanted = {}, {}
    with open_checkpoint(str(path)) as checkpoint:
        held = {name: lazy.read(Box.full(lazy.shape)).clone() for name, lazy in checkpoint.items()}
    for name, tensor in held.items():
        files[name] = wanted[name] = tensor
        if name.endswith("_proj.weight"):
            files[name], files[f"{name}_scale_inv"] = in_blocks(tensor.float(), size)
            wanted[name] = whole(files[name], files[f"{name}_scale_inv"], size)
        wanted[name] = wanted[name].to(torch.bfloat16)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(files, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [size, size]}
    (path / "config.json").write_text(json.dumps(values))
    return wanted
