"""trainer_ops: a patched transformers model has the logprobs of a deterministic engine, in bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.rank_threads import Session, loaded, run_ranks
from tiny_models import ARCHITECTURES, randomize, write_tiny
from torch import Tensor
from trainer_ops.batches import (
    Sampled,
    deterministic_engine,
    new_tokens,
    packed,
    padded,
    sample,
    temperatures,
)

from rollout import SamplingParams
from rollout.integrations.router_replay import expert_batch, replayed_experts
from rollout.models.config.model import ModelConfig
from rollout.trainer_ops import logprobs_of, patch, token_logprobs
from rollout.trainer_ops.patch import SUPPORTED

pytestmark = pytest.mark.usefixtures("forked_ranks")


def assert_equal(model: Any, sequences: list[Sampled]) -> None:
    """Padded on the right and on the left, and packed: all of the engine's bits."""
    for left in (False, True):
        ids, mask = padded(sequences, left=left)
        raw = token_logprobs(model, ids, mask)
        processed = token_logprobs(model, ids, mask, temperature=temperatures(sequences))
        assert raw.dtype == torch.float32
        for wanted, own in (("raw", raw), ("processed", processed)):
            for got, s in zip(new_tokens(own, mask, sequences), sequences, strict=True):
                assert torch.equal(got, getattr(s, wanted)), f"{wanted}, left {left}"
    ids, positions = packed(sequences)
    row, at = token_logprobs(model, ids, position_ids=positions)[0], 0
    for s in sequences:
        assert row[at] == 0
        assert torch.equal(row[at + s.start : at + len(s.ids)], s.raw)
        at += len(s.ids)


def unpatched(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The logprobs of transformers' own ops."""
    logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return torch.nn.functional.pad(logprobs_of(logits, ids[:, 1:]), (1, 0))


ALWAYS = {
    ("llama", torch.float32),
    ("qwen3", torch.bfloat16),
    ("gemma2", torch.bfloat16),
    ("qwen2_moe", torch.float32),
}
BOTH = ("llama", "phi3", "qwen3", "cohere", "gemma2", "olmo2", "gpt_oss", "mixtral", "qwen2_moe")
ONCE = (
    *("mistral", "ministral", "qwen2", "cohere2", "gemma", "gemma3", "glm", "glm4", "glm4_moe"),
    *("granite", "minimax_m2", "olmo3", "olmoe", "qwen3_moe", "smollm3"),
)
SETTINGS: dict[str, dict[str, Any]] = {"llama": {"tied": True}, "granite": {"logits_scaling": 2.0}}


def test_all_that_are_supported_are_compared() -> None:
    names = {ARCHITECTURES[arch][1].__name__ for arch in (*BOTH, *ONCE)}
    assert names == set(SUPPORTED)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *sorted(ALWAYS, key=str),
        *(
            pytest.param(arch, dtype, marks=pytest.mark.more)
            for arch in (*BOTH, *ONCE)
            for dtype in (torch.float32, torch.bfloat16)
            if (arch, dtype) not in ALWAYS and (arch in BOTH or dtype == torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_logprobs_are_the_engines_bit_for_bit_before_and_after_an_update(
    arch: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = write_tiny(tmp_path, arch, dtype=dtype, **SETTINGS.get(arch, {}))
    with deterministic_engine(tmp_path) as engine, torch.no_grad():
        sequences = sample(engine)
        ids, mask = padded(sequences)
        plain = new_tokens(unpatched(model, ids, mask), mask, sequences)
        assert not all(map(torch.equal, plain, [s.raw for s in sequences]))  # or it shows nothing
        with patch(model):
            assert_equal(model, sequences)
            torch.manual_seed(1)
            randomize(model)
            engine.update_weights(model)
            assert_equal(model, sample(engine, seed=1))
        again = new_tokens(unpatched(model, ids, mask), mask, sequences)
        assert not all(map(torch.equal, again, [s.raw for s in sequences]))


@pytest.mark.more
def test_logprobs_are_those_of_an_engine_on_two_ranks(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "qwen2", dtype=torch.bfloat16)
    with deterministic_engine(tmp_path, ranks=2) as engine, torch.no_grad(), patch(model):
        assert_equal(model, sample(engine))


@pytest.mark.parametrize(
    ("dtype", "layout", "shape"),
    [
        (torch.float32, "plain", {}),
        (torch.bfloat16, "tiles", {}),
        # Parts that fill no tile, of a whole that does; inputs that make two segments, or one.
        (torch.bfloat16, "tiles", {"num_key_value_heads": 4, "head_dim": 12}),
        (torch.bfloat16, "tiles", {"intermediate_size": 102, "vocab_size": 331}),
    ],
    ids=str,
)
def test_logits_are_those_of_two_ranks(
    dtype: torch.dtype, layout: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 8, "intermediate_size": 208, **shape}
    model = write_tiny(tmp_path, "qwen2", dtype=dtype, **sizes)
    config, weights = ModelConfig.from_directory(tmp_path), model.state_dict()
    ids = torch.randint(0, 320, (2, 37), generator=torch.Generator().manual_seed(2))

    def work(tp: Any) -> Tensor:
        ranks = loaded(config, tp, weights, dtype, layout, deterministic=True)
        return torch.stack(Session(ranks, ids.tolist()).advance([37, 37]))

    wanted = run_ranks(2, work)[0]
    with torch.no_grad(), patch(model, weight_layout=layout):
        assert torch.equal(model(ids).logits, wanted)


@pytest.mark.parametrize("whole", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize("arch", ["qwen2_moe", "olmoe"])
def test_logits_of_a_mixture_are_those_of_two_ranks(arch: str, whole: bool, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, arch, dtype=torch.bfloat16)
    config, weights = ModelConfig.from_directory(tmp_path), model.state_dict()
    ids = torch.randint(0, 320, (2, 37), generator=torch.Generator().manual_seed(2))

    def work(tp: Any) -> Tensor:
        ranks = loaded(config, tp, weights, torch.bfloat16, "tiles", whole, deterministic=True)
        return torch.stack(Session(ranks, ids.tolist()).advance([37, 37]))

    wanted = run_ranks(2, work)[0]
    with torch.no_grad(), patch(model, weight_layout="tiles", expert_parallel=whole):
        assert torch.equal(model(ids).logits, wanted)


def test_experts_that_a_rollout_chose_are_replayed_in_a_patched_model(tmp_path: Path) -> None:
    """Those are its own, so that no bit changes; others change the logits."""
    model = write_tiny(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    with deterministic_engine(tmp_path) as engine, torch.no_grad(), patch(model):
        asked = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, return_routed_experts=True)
        (out,) = engine.generate([[7, 8, 9]], asked)
        one = out.outputs[0]
        ids = torch.tensor([[7, 8, 9, *one.token_ids]])
        told = expert_batch([one.routed_experts], ids.shape[1])
        with replayed_experts(model, told) as replay:
            own = token_logprobs(model, ids)[0, 3:]
        assert own.tolist() == list(one.logprobs.raw)
        assert (replay.routed, replay.differing) == (2 * (ids.shape[1] - 1), 0)
        with replayed_experts(model, (told + 1) % 6):
            assert not torch.equal(token_logprobs(model, ids)[0, 3:], own)


def test_a_float32_head_over_bfloat16_is_the_engines(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "llama", dtype=torch.bfloat16)
    engine = deterministic_engine(tmp_path, head_dtype="float32")
    with engine, torch.no_grad(), patch(model, head_dtype=torch.float32):
        (out,) = engine.generate([[7, 8, 9]], SamplingParams(max_tokens=8, ignore_eos=True, seed=3))
        ids = torch.tensor([[7, 8, 9, *out.outputs[0].token_ids]])
        own = token_logprobs(model, ids)[0, 3:]
    assert own.tolist() == list(out.outputs[0].logprobs.raw)


def test_a_logprob_is_log_softmax_and_has_its_gradient() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 5, 700, generator=rng) * 4).requires_grad_()
    ids = torch.randint(0, 700, (2, 5), generator=rng)
    scale = torch.tensor([[1.0], [0.6]])
    weights = torch.randn(2, 5, generator=rng)
    wide = logits.detach().double().requires_grad_()
    wanted = (wide / scale[..., None]).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    own = logprobs_of(logits, ids, scale)
    torch.testing.assert_close(own, wanted.float(), rtol=1e-6, atol=1e-6)
    (own * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)
