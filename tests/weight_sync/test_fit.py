"""What is sent under wrong names or shapes: the cause first, where it shows."""

from __future__ import annotations

import pytest
import torch

from rollout.errors import WeightMismatch
from rollout.weight_sync.protocol.fit import check_metadata
from rollout.weights import TensorMeta
from rollout.weights.wanted import WantedWeights

WANTED = {
    name: TensorMeta(name, torch.float32, shape)
    for name, shape in {
        "model.embed_tokens.weight": (32, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 16),
        "model.norm.weight": (8,),
        "lm_head.weight": (32, 8),
    }.items()
}


def said(sent: dict[str, tuple[int, ...]]) -> str:
    metas = [TensorMeta(name, torch.float32, shape) for name, shape in sent.items()]
    with pytest.raises(WeightMismatch) as caught:
        check_metadata(metas, WantedWeights(dtype=torch.float32, tensors=WANTED))
    assert len(caught.value.problems) > 3  # all, whatever the text has room for
    return str(caught.value)


def test_names_behind_a_prefix_are_told_so_before_any_is_named() -> None:
    wrapped = {f"pretrained_model.{name}": meta.shape for name, meta in WANTED.items()}
    text = said({**wrapped, "v_head.summary.weight": (1, 8)})
    assert text.startswith(
        "the update does not fit the model: 4 names begin with 'pretrained_model.', and are the "
        "model's without it (beside these it has no v_head.summary.weight): send the module that "
        "lies there, or take the prefix off; "
    )
    assert text.count(" is unknown") == 3
    assert "begin with" not in said({f"x{name}": meta.shape for name, meta in WANTED.items()})


def test_local_shards_are_told_from_other_shapes() -> None:
    halves = {name: (meta.shape[0] // 2, *meta.shape[1:]) for name, meta in WANTED.items()}
    assert "4 tensors have 1/2 of the model's rows, as the local shards of so many" in said(halves)
    halves["model.norm.weight"] = (3,)
    assert "shards" not in said(halves)
    assert "shards" not in said({name: (*meta.shape, 1) for name, meta in WANTED.items()})


def test_codes_of_four_bits_are_told_to_be_codes_and_not_of_another_shape() -> None:
    """As bitsandbytes packs them: two to a byte, in one column."""
    name = "model.layers.0.mlp.down_proj.weight"
    sent = [*WANTED.values()]
    sent[sent.index(WANTED[name])] = TensorMeta(name, torch.uint8, (64, 1))
    with pytest.raises(
        WeightMismatch, match=rf"{name} has dtype torch\.uint8.*dequantise it first"
    ):
        check_metadata(sent, WantedWeights(dtype=torch.float32, tensors=WANTED))
