"""deterministic=True: equal bits on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from determinism.schedules import MAX_LEN, bits, sequence
from models.rank_threads import Session, loaded, run_ranks
from tiny_models import DENSE, write_tiny
from torch import Tensor
from torch.nn.functional import gelu

from rollout import Rollout, SamplingParams
from rollout.distributed import TensorParallel
from rollout.engine.facts import differing_facts
from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig
from rollout.models.layers.activations import gelu_tanh, sigmoid

pytestmark = pytest.mark.usefixtures("forked_ranks")

SIZES = (1, 2, 4)
MIXTURES = (
    *("qwen3_moe", "mixtral", "olmoe", "phimoe", "gpt_oss", "llama4", "minimax_m2", "glm4_moe"),
)
STEPS = [[7, 3, 20], [1, 0, 1], [0, 3, 5], [1, 0, 1], [1, 0, 6]]
# Four heads or more, so that four ranks have some; sums of many inputs, so that orders show.
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "vocab_size": 331,
}


def _logits(
    path: Path,
    dtype: torch.dtype,
    layout: str,
    deterministic: bool,
    expert_parallel: bool = False,
    sizes: tuple[int, ...] = SIZES,
) -> list[Tensor]:
    """Of all steps, for each number of ranks that the model divides over."""
    config = ModelConfig.from_directory(path)
    weights = torch.load(path / "weights.pt")
    rng = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 320, (n,), generator=rng).tolist() for n in (10, 6, 33)]

    def work(tp: TensorParallel) -> Tensor:
        how = (dtype, layout, expert_parallel, deterministic)
        model = loaded(config, tp, weights, *how)
        session = Session(model, sequences)
        return torch.cat([part for step in STEPS for part in session.advance(step)])

    found = []
    for size in sizes:
        try:
            config.check_tensor_parallel(size, expert_parallel)
        except ConfigError:
            continue
        ranks = run_ranks(size, work)
        assert all(torch.equal(ranks[0], other) for other in ranks)
        found.append(ranks[0])
    return found


def _write(path: Path, arch: str, dtype: torch.dtype, **shape: Any) -> None:
    source = write_tiny(path, arch, dtype=dtype, **{**WIDE, **shape})
    torch.save(source.state_dict(), path / "weights.pt")


@pytest.mark.parametrize(
    ("arch", "dtype", "layout"),
    [
        ("qwen2", torch.float32, "plain"),
        ("qwen2", torch.bfloat16, "plain"),
        ("qwen2", torch.bfloat16, "tiles"),
        ("olmo2", torch.float32, "plain"),  # norms over the heads of all ranks
    ],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_logits(
    arch: str, dtype: torch.dtype, layout: str, tmp_path: Path
) -> None:
    _write(tmp_path, arch, dtype)
    one, two, four = _logits(tmp_path, dtype, layout, True)
    assert torch.equal(one, two)
    assert torch.equal(one, four)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["", "expert parallel"])
@pytest.mark.parametrize("arch", [
    "qwen2_moe", *(pytest.param(arch, marks=pytest.mark.more) for arch in MIXTURES)
])  # fmt: skip
def test_any_number_of_ranks_gives_the_same_logits_of_a_mixture(
    arch: str, expert_parallel: bool, tmp_path: Path
) -> None:
    dtype = torch.float32 if expert_parallel else torch.bfloat16
    source = write_tiny(tmp_path, arch, dtype=dtype)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    one, two, four = _logits(tmp_path, dtype, "tiles", True, expert_parallel)
    assert torch.equal(one, two)
    assert torch.equal(one, four)
    (plain,) = _logits(tmp_path, dtype, "tiles", False, expert_parallel, sizes=(1,))
    error = (one - plain).abs().mean() / plain.abs().mean()
    assert error < (1e-5 if dtype == torch.float32 else 0.05)


def test_without_it_ranks_change_bits(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    _write(tmp_path, "qwen2", torch.float32)
    one, two, _ = _logits(tmp_path, torch.float32, "plain", False)
    assert not torch.equal(one, two)


@pytest.mark.more
@pytest.mark.parametrize("arch", DENSE)
def test_any_dense_architecture_gives_the_same_logits(arch: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path, arch, dtype=torch.bfloat16, num_attention_heads=8)
    config = ModelConfig.from_directory(tmp_path)
    if config.recurrent_layers:
        pytest.skip("refused by name")
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    one, two, four = _logits(tmp_path, torch.bfloat16, "tiles", True)
    assert torch.equal(one, two)
    assert torch.equal(one, four)


@pytest.mark.parametrize(
    "shape",
    [
        {"intermediate_size": 200},  # 50 inputs of a rank of four: an even number, but no tiles
        {"intermediate_size": 100},  # 25
        {"num_attention_heads": 2, "intermediate_size": 102},  # two ranks at most, of 51 inputs
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10},
    ],
    ids=str,
)
def test_sizes_that_segments_or_tiles_do_not_divide_give_the_same_logits(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    _write(tmp_path, "llama", torch.bfloat16, **shape)
    found = _logits(tmp_path, torch.bfloat16, "tiles", True)
    assert len(found) == (2 if shape.get("num_attention_heads") == 2 else 3)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.more
@pytest.mark.parametrize(
    ("arch", "dtype", "sizes"),
    [("qwen3", "float32", (1, 4)), ("qwen3", "bfloat16", SIZES), ("qwen2_moe", "float32", (1, 2))],
)
def test_any_number_of_ranks_samples_the_same_tokens_and_logprobs(
    arch: str, dtype: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    write_tiny(tmp_path, arch, num_attention_heads=8, dtype=getattr(torch, dtype))
    calls = [sequence(number) for number in range(40)]
    prompts = [prompt for prompt, _ in calls]
    params = [SamplingParams(**settings) for _, settings in calls]
    found = []
    for size in sizes:
        with Rollout(
            str(tmp_path),
            tensor_parallel_size=size,
            deterministic=True,
            device="cpu",
            max_model_len=MAX_LEN,
            num_threads=1 if size > 1 else 2,
            max_num_batched_tokens=2048 if size == 1 else 64,
            skip_tokenizer_init=True,
        ) as rollout:
            found.append([bits(out) for out in rollout.generate(prompts, params)])
    assert all(found[0] == other for other in found[1:])


@pytest.mark.parametrize("activation", [sigmoid, gelu_tanh])
def test_an_activation_does_not_depend_on_where_an_element_lies(
    activation: Callable[[Tensor], Tensor],
) -> None:
    """torch's own do: elements that fill no vector take another way."""
    x = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)) * 3
    torchs = torch.sigmoid if activation is sigmoid else partial(gelu, approximate="tanh")
    whole = activation(x)
    torch.testing.assert_close(whole, torchs(x.double()).float(), rtol=1e-5, atol=1e-6)
    for rows in (1, 3, 7, 16):
        assert torch.equal(torch.cat([activation(part) for part in x.split(rows)]), whole)
    assert sigmoid(torch.tensor([-200.0, 200.0])).tolist() == [0.0, 1.0]


def test_another_number_of_ranks_is_no_reason_for_other_bits() -> None:
    then = {"tensor_parallel_size": 1, "deterministic": True, "settings": {}}
    assert differing_facts(then, {**then, "tensor_parallel_size": 2}) == []
    adapted = {"tensor_parallel_size": 2, "settings": {"max_adapters": 4}}
    for other in (adapted, {"tensor_parallel_size": 2, "deterministic": False}):
        assert any("parallel" in line for line in differing_facts(then, {**then, **other}))
