"""Releases whose linears are quantised: a tiny model's files, rewritten."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny
from torch import Tensor

# What real releases say in ``config.json``: DeepSeek-V3 and Qwen3-FP8, llm-compressor's FP8-dynamic
# and W8A8.
BLOCKS = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128],
}  # fmt: skip


def compressed(kind: str) -> dict[str, object]:
    """As compressed-tensors says channels of 8 bits; ``kind``: int or float."""
    activations = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
    weights = {"dynamic": False, "num_bits": 8, "strategy": "channel", "symmetric": True}
    return {
        "config_groups": {
            "group_0": {
                "input_activations": {**activations, "type": kind},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {**weights, "type": kind},
            }
        },
        "format": f"{kind}-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


LINEARS = ("_proj.weight", "_proj_with_mqa.weight")
CONFIGS = {"fp8_block": BLOCKS, "fp8": compressed("float"), "int8": compressed("int")}
DTYPES = {"fp8_block": torch.float8_e4m3fn, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def write_release(path: Path, scheme: str, arch: str = "qwen3", seed: int = 0, **shape) -> dict:
    """A directory with codes and scales that no quantiser of ours would choose; its tensors."""
    write_tiny(path, arch, seed=seed, dtype=torch.bfloat16, **shape)
    [file] = path.glob("*.safetensors")
    generator = torch.Generator().manual_seed(100 + seed)
    files: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        files[name] = tensor
        if name.endswith(LINEARS):
            files |= codes_and_scales(name, tensor.float(), scheme, generator)
    save_file(files, file)
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = CONFIGS[scheme]
    (path / "config.json").write_text(json.dumps(values))
    return files


def write_mxfp4_release(path: Path, seed: int = 0, **shape) -> dict[str, Tensor]:
    """As gpt-oss is released: experts in four bits, random ones, all else in bfloat16; its tensors.

    Scales of the first rows are such that our quantiser would choose others.
    """
    write_tiny(path, "gpt_oss", seed=seed, dtype=torch.bfloat16, **shape)
    [file] = path.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1 + seed)
    files: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            files[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        blocks[:, :4] &= 0x33  # of magnitudes up to 1.5
        scales = torch.randint(118, 124, blocks.shape[:-1], generator=generator)
        files[f"{name}_blocks"], files[f"{name}_scales"] = blocks.byte(), scales.byte()
    save_file(files, file)
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = {
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
            *("model.embed_tokens", "lm_head"),
        ],
        "quant_method": "mxfp4",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(values))
    return files


def codes_and_scales(
    name: str, weight: Tensor, scheme: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """Of one linear; scales are 0.6 to 1.9 times what its largest values need."""
    rows, columns = weight.shape
    block = (128, 128) if scheme == "fp8_block" else (1, columns)
    shape = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    largest = 127 if scheme == "int8" else 448
    scales = (0.6 + 1.3 * torch.rand(shape, generator=generator)) * weight.abs().max() / largest
    if scheme != "fp8_block":
        scales = scales.bfloat16()  # as llm-compressor writes them
    wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    values = weight / wide[:rows, :columns]
    values = values.round().clamp(-128, 127) if scheme == "int8" else values.clamp(-448, 448)
    ending = "_scale_inv" if scheme == "fp8_block" else "_scale"
    return {name: values.to(DTYPES[scheme]), f"{name}{ending}": scales}
