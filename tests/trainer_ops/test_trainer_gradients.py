"""trainer_ops: gradients are those of plain torch, and learning starts on policy every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import write_tiny
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trainer_ops.batches import deterministic_engine, new_tokens, padded, sample, temperatures

from rollout.trainer_ops import patch, token_logprobs


def gradients(model: Any, dtype: torch.dtype, *, pads: bool = True) -> dict[str, Tensor]:
    """Of a loss over sequences, float64 by name; the model is left in float32.

    ``pads``: one has padding behind it, another before.
    """
    rng = torch.Generator().manual_seed(5)
    ids, weights = (f(rng) for f in (_ids, lambda g: torch.randn(3, 29, generator=g)))
    mask = torch.ones_like(ids)
    if pads:
        mask[0, 20:], mask[1, :9] = 0, 0
    model.to(dtype).zero_grad()
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits
    chosen = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    real = mask[:, 1:] * mask[:, :-1]
    (chosen * real * weights[:, 1:]).sum().backward()
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    model.float()
    return found


def _ids(rng: torch.Generator) -> Tensor:
    return torch.randint(3, 320, (3, 29), generator=rng)


def _error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest of all parameters' relative distances."""
    assert found.keys() == wanted.keys()
    pairs = [(found[name], value) for name, value in wanted.items() if value.norm() > 0]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
# Each way in which blocks differ: norms, gates, factors, caps, halves beside each other, experts.
WIDER = ("gemma2", "gemma3", "granite", "olmo2", "cohere", "glm4", "gpt_oss", "mixtral", "glm4_moe")


@pytest.mark.parametrize(
    "arch", ["qwen2_moe", *(pytest.param(arch, marks=pytest.mark.more) for arch in WIDER)]
)
def test_gradients_of_other_blocks_are_those_of_the_plain_model(arch: str, tmp_path: Path) -> None:
    model: Any = write_tiny(
        tmp_path, arch, **({"logits_scaling": 2.0} if arch == "granite" else {})
    )
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the one that takes float64
    pads = arch != "gemma2"  # whose plain attention makes NaN of rows that see padding alone
    own: Any = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    exact = gradients(model, torch.float64, pads=pads)
    with patch(own):
        assert _error(gradients(own, torch.float32, pads=pads), exact) < 2e-5


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "phi3"])
def test_gradients_are_those_of_the_plain_model(arch: str, tmp_path: Path) -> None:
    """Window, biases and fused linears among them."""
    model: Any = write_tiny(tmp_path, arch, **(WINDOW if arch == "qwen2" else {}))
    exact = gradients(model, torch.float64)
    own: Any = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    with patch(own):
        assert _error(gradients(own, torch.float32), exact) < 2e-5
    rounded = gradients(model.bfloat16().float(), torch.float64)
    plain = _error(gradients(model, torch.bfloat16), rounded)
    with patch(model, dtype=torch.bfloat16):
        assert _error(gradients(model, torch.bfloat16), rounded) < 1.5 * plain < 0.5


def test_gradient_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    model: Any = write_tiny(tmp_path, "llama").train()
    with patch(model):
        plain = gradients(model, torch.float32)
        model.activation_checkpointing_enable({"use_reentrant": False})
        again = gradients(model, torch.float32)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.more)])
def test_the_ratio_of_a_fresh_policy_is_exactly_one_at_every_step_of_training(
    arch: str, tmp_path: Path
) -> None:
    model: Any = write_tiny(tmp_path, arch)
    patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with deterministic_engine(tmp_path) as engine:
        for step in range(2):
            sequences = sample(engine, seed=step)
            ids, mask = padded(sequences)
            old = [s.processed for s in sequences]
            for epoch in range(2):
                logprobs = token_logprobs(model, ids, mask, temperature=temperatures(sequences))
                pairs = zip(new_tokens(logprobs, mask, sequences), old, strict=True)
                ratio = torch.cat([(new - was).exp() for new, was in pairs])
                assert (ratio == 1.0).all().item() == (epoch == 0)
                loss = -(logprobs * torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            receipt = engine.update_weights(model)
            assert receipt.version == step + 1


@pytest.mark.more
@pytest.mark.parametrize("arch", ["qwen3", "qwen2_moe"])
def test_fsdp_with_mixed_precision_is_equal_to_an_engine_in_its_dtype(
    arch: str, tmp_path: Path
) -> None:
    """Parameters are float32, the engine's weights and all ops bfloat16."""
    model: Any = write_tiny(tmp_path / "model", arch)
    patch(model, dtype=torch.bfloat16)
    where = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with deterministic_engine(tmp_path / "model", dtype="bfloat16") as engine:
            for step in range(2):
                sequences = sample(engine, seed=step)
                ids, mask = padded(sequences)
                own = token_logprobs(model, ids, mask, temperature=temperatures(sequences))
                pairs = zip(new_tokens(own, mask, sequences), sequences, strict=True)
                assert all(torch.equal(new, s.processed) for new, s in pairs)
                own.sum().backward()
                optimizer.step()
                engine.update_weights(model)
    finally:
        dist.destroy_process_group()
