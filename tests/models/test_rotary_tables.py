"""Rotary tables against those transformers computes, near and beyond the original length."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig
from rollout.models.layers.rotary import Rotary

ORIGINAL = 2048
BASE = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "vocab_size": 8}
ROPES = {
    "default": {},
    "another theta": {"rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn in full": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "yarn with a given attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.5,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + i / 40 for i in range(16)],
        "long_factor": [1.5 + i for i in range(16)],
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope, factor from the lengths": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0 + i for i in range(16)],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def both(rope, length, max_positions=8192):
    """Our tables for engines that serve ``length``, and transformers' at that very length."""
    theirs = LlamaConfig(
        **BASE,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    read = ModelConfig.from_hf({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    ours = Rotary(
        read.layers[0].rope, 32, max_positions, length, torch.float32, torch.device("cpu")
    )
    reference = LlamaRotaryEmbedding(theirs)
    return ours, reference


@pytest.mark.parametrize("length", [1024, 8192, 12000])
@pytest.mark.parametrize("kind", ROPES)
def test_tables_equal_those_of_transformers_at_the_served_length(kind, length):
    ours, reference = both(ROPES[kind], length)
    positions = torch.tensor([p for p in (0, 1, 1023, 4095, 8191, 11999) if p < length])
    # transformers decides by the longest position of the call.
    asked = torch.cat((positions, torch.tensor([length - 1])))
    cos, sin = reference(torch.zeros(1), asked[None])
    got_cos, got_sin = ours(positions)
    assert got_cos.shape == (len(positions), 32)
    assert torch.equal(got_cos, cos[0, :-1])
    assert torch.equal(got_sin, sin[0, :-1])


def test_the_reference_does_depend_on_length_where_we_fix_it():
    for kind in ("dynamic", "longrope"):
        short, long = (both(ROPES[kind], n)[0](torch.tensor([7]))[0] for n in (1024, 12000))
        assert not torch.allclose(short, long)


def test_short_sequences_of_an_engine_limited_to_the_original_length_match_transformers():
    ours, reference = both(ROPES["longrope"], ORIGINAL)
    cos, sin = reference(torch.zeros(1), torch.arange(9)[None])
    assert torch.equal(torch.stack(ours(torch.arange(9))), torch.stack((cos[0], sin[0])))


CONFIG = {
    **BASE,
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "linear", "factor": 1.0},
    "partial_rotary_factor": 0.25,
}


def test_a_partial_rotation_turns_the_first_dims_alone():
    rope = ModelConfig.from_hf(CONFIG).layers[0].rope
    assert rope.partial == 0.25
    ours = Rotary(rope, 32, 64, 64, torch.float32, torch.device("cpu"))
    cos, _ = ours(torch.tensor([3]))
    angles = 3 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    assert torch.allclose(cos[0], angles.repeat(2).cos())


@pytest.mark.parametrize("partial", [0.3, 0.0, 1.5])  # 9 dims, none, more than a head has
def test_a_rotation_that_no_head_can_make_is_refused(partial):
    rope = replace(ModelConfig.from_hf(CONFIG).layers[0].rope, partial=partial)
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        Rotary(rope, 32, 64, 64, torch.float32, torch.device("cpu"))


def test_tables_are_cast_after_float32_arithmetic():
    rope = (
        ModelConfig.from_hf(
            {**LlamaConfig(**BASE).to_dict(), "architectures": ["LlamaForCausalLM"]}
        )
        .layers[0]
        .rope
    )
    exact = Rotary(rope, 32, 2048, 2048, torch.float32, torch.device("cpu"))
    rounded = Rotary(rope, 32, 2048, 2048, torch.bfloat16, torch.device("cpu"))
    where = torch.tensor([0, 1, 2047])
    assert torch.equal(rounded(where)[0], exact(where)[0].bfloat16())
