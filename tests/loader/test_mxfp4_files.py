"""Experts packed in mxfp4, read as transformers unpacks them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import write_tiny
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.loader import open_checkpoint
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.weights import Box

NAME = "model.layers.0.mlp.experts.down_proj"


def packed(experts: int = 3, rows: int = 5, groups: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator)
    scales = torch.randint(100, 140, (experts, rows, groups), generator=generator)
    return {
        f"{NAME}_blocks": blocks.to(torch.uint8),
        f"{NAME}_scales": scales.to(torch.uint8),
        f"{NAME}_bias": torch.ones(experts, rows),
    }


def test_a_box_of_packed_experts_is_that_box_of_what_transformers_unpacks(tmp_path):
    tensors = packed()
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = convert_moe_packed_tensors(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"])
    with open_checkpoint(str(tmp_path)) as checkpoint:
        found = dict(checkpoint.items())
        assert set(found) == {NAME, f"{NAME}_bias"}
        assert (found[NAME].shape, found[NAME].dtype) == ((3, 128, 5), torch.bfloat16)
        assert tuple(wanted.shape) == found[NAME].shape
        for box in (
            Box.full((3, 128, 5)),
            Box((1, 17, 2), (3, 71, 4)),
            Box((0, 32, 0), (1, 64, 5)),
        ):
            assert torch.equal(found[NAME].read(box), wanted[box.slices])


def test_packed_experts_without_their_scales_are_refused(tmp_path):
    tensors = packed()
    del tensors[f"{NAME}_scales"]
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj_blocks of shape .* needs .*down_proj_scales"):
        open_checkpoint(str(tmp_path))


def test_a_packed_checkpoint_makes_the_model_that_its_unpacked_weights_make(tmp_path):
    source = write_tiny(tmp_path, "gpt_oss", intermediate_size=32)
    weights, files = dict(source.state_dict()), {}
    for name, tensor in source.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            files[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        made = packed(experts, outputs, inputs // 32)
        files |= {name + kind: made[f"{NAME}{kind}"] for kind in ("_blocks", "_scales")}
        weights[name] = convert_moe_packed_tensors(
            made[f"{NAME}_blocks"], made[f"{NAME}_scales"]
        ).float()
    save_file(files, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_directory(tmp_path)
    for rank in range(2):
        two = [build_model(config, TensorParallel(rank, 2), torch.float32, "cpu") for _ in range(2)]
        with open_checkpoint(str(tmp_path)) as checkpoint:
            two[0].load_weights(checkpoint.items())
        two[1].load_weights(weights.items())
        for one, other in zip(two[0].parameters(), two[1].parameters(), strict=True):
            assert torch.equal(one, other)
