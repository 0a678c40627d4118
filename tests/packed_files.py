"""Tiny models whose linears are integers packed in int32: word by word, as each format says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny
from torch import Tensor

GROUP = 16
CONFIGS = {
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False,
        "checkpoint_format": "gptq",
    },
    "gptq_v2": {
        "quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": None,
    },
    **{
        name: {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"], "input_activations": None, "output_activations": None,
                    "weights": {
                        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP,
                        "symmetric": name == "symmetric", "dynamic": False, "actorder": None,
                    },
                }
            },
            "ignore": ["lm_head"], "quantization_status": "compressed",
        }
        for name in ("symmetric", "asymmetric")
    },
}  # fmt: skip


def write_packed(path: Path, form: str, arch: str = "qwen3", **shape) -> dict[str, Tensor]:
    """A directory in that form, with random codes; returns the floats that it stands for."""
    write_tiny(path, arch, dtype=torch.bfloat16, **shape)
    [file] = path.glob("*.safetensors")
    generator = torch.Generator().manual_seed(7)
    files: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            made, floats[name] = packed(form, name.removesuffix(".weight"), tensor.shape, generator)
            files |= made
        else:
            files[name] = floats[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, file)
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = CONFIGS[form]
    (path / "config.json").write_text(json.dumps(values))
    return floats


def packed(
    form: str, stem: str, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a weight [N, K] of random codes, zeros and scales, and what they stand for."""
    rows, columns = shape
    bits = 8 if form == "gptq_v2" else 4
    groups = -(-columns // GROUP)
    order = torch.arange(columns) // GROUP
    if form == "gptq":
        order = order[torch.randperm(columns, generator=generator)]
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=generator)
    if form == "symmetric":
        zeros = torch.full((rows, groups), 1 << bits - 1)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / 200
    scales = scales.to(torch.bfloat16 if "symmetric" in form else torch.float16)
    values = (codes - zeros[:, order]).float() * scales.float()[:, order]
    if form.startswith("gptq"):
        made = {
            "qweight": words(codes.T, 0, bits),
            # As GPTQModel takes one from all zeros of a word: one that is 0 borrows of the next.
            "qzeros": words(zeros.T, 1, bits) - (0x11111111 if form == "gptq" else 0),
            "scales": scales.T,
            "g_idx": order.int(),
        }
    elif form == "awq":
        turns = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight columns, in the order of a word's nibbles
        made = {
            "qweight": words(turned(codes.T, turns), 1, bits),
            "qzeros": words(turned(zeros.T, turns), 1, bits),
            "scales": scales.T,
        }
    else:
        made = {
            "weight_packed": words(codes, 1, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(shape),
        }
        if form == "asymmetric":
            made["weight_zero_point"] = words(zeros, 0, bits)
    return {f"{stem}.{name}": tensor for name, tensor in made.items()}, values


def turned(codes: Tensor, turns: list[int]) -> Tensor:
    return codes.view(len(codes), -1, 8)[:, :, turns].reshape(codes.shape)


def words(codes: Tensor, axis: int, bits: int) -> Tensor:
    """int32, each of 32 / bits codes along ``axis``, the first in the lowest bits."""
    per = 32 // bits
    lines = codes if axis else codes.T
    found = torch.zeros(len(lines), -(-lines.shape[1] // per), dtype=torch.int64)
    for at in range(lines.shape[1]):
        found[:, at // per] |= lines[:, at] << bits * (at % per)
    found = torch.where(found >= 1 << 31, found - (1 << 32), found).int()
    return found if axis else found.T
