"""The native run of all blocks gives the bits that they give op by op."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import Session, loaded, run_ranks
from tiny_models import DENSE, write_tiny
from torch import Tensor

from rollout.distributed import TensorParallel
from rollout.kernels.kv_codes import LARGEST
from rollout.kernels.native import library
from rollout.kernels.op import watch_ops
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.config.model import ModelConfig
from rollout.models.decoder.native_blocks import NativeBlocks, knows

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

STEPS = [[7, 3, 20], [1, 0, 1], [0, 3, 5], [1, 0, 1], [1, 0, 6]]
SHAPES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "seven queries per key, one block": {
        "hidden_size": 112,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_layers": 1,
    },
    "inner layer smaller than q, k and v, tied": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 32,
        "tied": True,
    },
}
BIASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
}


def _run(
    model: CausalLM,
    lengths: tuple[int, ...] = (10, 6, 33),
    steps: list[list[int]] = STEPS,
    codes: torch.dtype | None = None,
) -> list[Tensor]:
    """Logits of every step and the KV cache after the last."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in lengths]
    session = Session(model, sequences, codes)
    logits = [part for step in steps for part in session.advance(step)]
    kept = [x for kv in session.kv for x in (kv.k, kv.v, kv.k_scales, kv.v_scales)]
    return logits + [x for x in kept if x is not None]


def _model(path: Path, arch: str = "qwen3", layout: str = "tiles", **shape: Any) -> CausalLM:
    source = write_tiny(path, arch, dtype=torch.bfloat16, **shape)
    config = ModelConfig.from_directory(path)
    return loaded(config, TensorParallel(), source.state_dict(), torch.bfloat16, layout)


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "int8": {"quantization": "int8"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", BIASES)
def test_blocks_in_one_call_have_the_bits_of_op_by_op(
    tmp_path: Path, arch: str, shape: str, kind: str
) -> None:
    source = write_tiny(tmp_path, arch, dtype=torch.bfloat16, **SHAPES[shape], **BIASES[arch])
    config, weights = ModelConfig.from_directory(tmp_path), source.state_dict()

    def work(tp: TensorParallel) -> bool:
        model = loaded(config, tp, weights, torch.bfloat16, "tiles", **KINDS[kind])
        assert model.native_blocks is not None
        together, reduced = _run(model), tp.all_reduces
        model.native_blocks = None
        apart = _run(model)
        return _equal(together, apart) and tp.all_reduces == 2 * reduced

    for size in (1, 2):
        assert all(run_ranks(size, work))


@pytest.mark.parametrize("codes", LARGEST, ids=str)
@pytest.mark.parametrize("arch", BIASES)
def test_pages_of_codes_have_the_bits_of_op_by_op(
    tmp_path: Path, arch: str, codes: torch.dtype
) -> None:
    model = _model(tmp_path, arch)
    together = _run(model, codes=codes)
    model.native_blocks = None
    assert len(together) == len(_run(model)) + 2 * model.config.num_layers
    assert _equal(together, _run(model, codes=codes))


def test_weights_that_moved_are_found(tmp_path: Path) -> None:
    """Sleep and wake give parameters other memory."""
    model = _model(tmp_path)
    before = _run(model)
    for parameter in model.parameters():
        old, parameter.data = parameter.data, parameter.data.clone()
        old.zero_()
    assert _equal(before, _run(model))


def test_who_watches_ops_sees_them(tmp_path: Path) -> None:
    model, seen = _model(tmp_path), set[str]()

    def watch(name: str, run: Any) -> Any:
        seen.add(name)
        return run

    unwatched = _run(model)
    watch_ops(watch)
    try:
        watched = _run(model)
    finally:
        watch_ops(None)
    assert _equal(watched, unwatched)
    assert {"paged_attention", "gated_linear", "add_rms_norm", "rope_and_cache"} <= seen


def test_the_bits_do_not_depend_on_threads(
    tmp_path: Path, set_threads: Callable[[int], None]
) -> None:
    model = _model(tmp_path)
    wanted = _run(model)
    for threads in (2, 3, 8):  # more than this machine has cores, perhaps
        set_threads(threads)
        assert _equal(wanted, _run(model))


def test_a_long_context_is_shared_out_in_every_block(
    tmp_path: Path, set_threads: Callable[[int], None]
) -> None:
    model = _model(tmp_path, max_position_embeddings=4096)
    long: Any = ((2103, 1030), [[2100, 1027], [1, 1], [1, 1], [1, 1]])
    set_threads(3)
    together = _run(model, *long)
    model.native_blocks = None
    assert _equal(together, _run(model, *long))


def test_a_part_of_each_head_is_rotated(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = _model(tmp_path, rope_parameters=rope)
    assert model.rotaries[0].dim == 8
    together = _run(model)
    assert model.native_blocks is not None
    model.native_blocks = None
    assert _equal(together, _run(model))


def test_what_the_native_code_is_not_made_for_runs_op_by_op(tmp_path: Path) -> None:
    assert _model(tmp_path / "plain", layout="plain").native_blocks is None
    assert _model(tmp_path / "mixture", "qwen3_moe").native_blocks is None
    assert _model(tmp_path / "odd", intermediate_size=120).native_blocks is None
    model = _model(tmp_path / "own")
    config = ModelConfig.from_directory(tmp_path / "own")
    float8 = build_model(
        config, TensorParallel(), torch.bfloat16, "cpu", "tiles", quantization="fp8"
    )
    layer = float8.model.layers[0].mlp.down
    assert layer.specs["weight"].layout.name == "tiles"
    assert float8.native_blocks is None
    blocks = list(model.model.layers)
    assert NativeBlocks.of(model.build, blocks)

    hook = blocks[0].self_attn.register_forward_hook(lambda *_: None)
    assert NativeBlocks.of(model.build, blocks) is None
    hook.remove()

    class Own(type(blocks[1].input_layernorm)):  # type: ignore[misc]
        pass

    blocks[1].input_layernorm.__class__ = Own
    assert NativeBlocks.of(model.build, blocks) is None


@pytest.mark.parametrize("arch", DENSE)
def test_an_architecture_runs_in_one_call_where_the_table_of_models_says_so(
    tmp_path: Path, arch: str
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    plain = {"layer_types": None} if arch == "ministral" else {}
    if arch == "ministral3":
        plain = {"rope_parameters": rope}
    write_tiny(tmp_path, arch, **plain)
    config = ModelConfig.from_directory(tmp_path)
    model = build_model(config, TensorParallel(), torch.bfloat16, "cpu", "tiles")
    assert isinstance(model, CausalLM)
    assert (model.native_blocks is not None) == knows(config.arch)
