"""deterministic=True: equal bits on 1, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from determinism.schedules import MAX_LEN, bits, sequence
from models.rank_threads import Session, loaded, run_ranks
from tiny_models import DENSE, write_tiny
from torch import Tensor

from rollout import Rollout, SamplingParams
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.config import ModelConfig

SIZES = (1, 2, 4)
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


def _logits(path: Path, dtype: torch.dtype, layout: str, deterministic: bool) -> list[Tensor]:
    """Of all steps, for each number of ranks that the model divides over."""
    config = ModelConfig.from_directory(path)
    weights = torch.load(path / "weights.pt")
    rng = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 320, (n,), generator=rng).tolist() for n in (10, 6, 33)]

    def work(tp: TensorParallel) -> Tensor:
        model = loaded(config, tp, weights, dtype, layout, deterministic=deterministic)
        session = Session(model, sequences)
        return torch.cat([part for step in STEPS for part in session.advance(step)])

    found = []
    for size in SIZES:
        try:
            config.check_tensor_parallel(size)
        except ConfigError:
            continue
        ranks = run_ranks(size, work)
        assert all(torch.equal(ranks[0], other) for other in ranks)
        found.append(ranks[0])
    return found


def _write(path: Path, arch: str, dtype: torch.dtype, **shape: Any) -> None:
    source = write_tiny(path, arch, dtype=dtype, **{**WIDE, **shape})
    torch.save(source.state_dict(), path / "weights.pt")


@pytest.mark.parametrize("arch", ["qwen2", "olmo2", "cohere"])
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.float32, "plain"), (torch.bfloat16, "plain"), (torch.bfloat16, "tiles")],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_logits(
    arch: str, dtype: torch.dtype, layout: str, tmp_path: Path
) -> None:
    _write(tmp_path, arch, dtype)
    one, two, four = _logits(tmp_path, dtype, layout, True)
    assert torch.equal(one, two)
    assert torch.equal(one, four)


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
@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (1, 4)), ("bfloat16", SIZES)])
def test_any_number_of_ranks_samples_the_same_tokens_and_logprobs(
    dtype: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    write_tiny(tmp_path, "qwen3", num_attention_heads=8, dtype=getattr(torch, dtype))
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
