"""What holds for the Triton kernels alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels.cases import attention

from rollout import kernels
from rollout.kernels.gpu_support import triton_runs

pytestmark = pytest.mark.skipif(not triton_runs(), reason="no Triton here")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_tokens_without_a_slot_are_passed_over() -> None:
    """A captured graph pads its batch with them: nothing of theirs may reach the cache."""
    k, v = (torch.randn(3, 2, 8, device=DEVICE) for _ in "kv")
    table = torch.ones(3, 8, device=DEVICE)
    slots = torch.tensor([4, -1, 7], device=DEVICE)
    caches = [torch.zeros(4, 2, 2, 8, device=DEVICE) for _ in "kv"]
    kernels.rope_and_cache.implementation("triton")(k, k, v, table, table * 0, *caches, slots)
    for cache, given in zip(caches, (k, v), strict=True):
        wanted = torch.zeros_like(cache)
        wanted[2, :, 0], wanted[3, :, 1] = given[0], given[2]
        assert torch.equal(cache, wanted)


@pytest.mark.skipif(DEVICE == "cuda", reason="eight gigabytes, of which the host needs pages")
def test_a_convolution_reads_tokens_that_lie_beyond_32_bits_of_elements(tmp_path: Path) -> None:
    """As those of a prompt of 174,000 tokens do, 12,352 elements apart."""
    far = 1 << 30  # elements between two tokens, in a file with holes
    file = str(tmp_path / "tokens")
    held = torch.from_file(file, shared=True, size=4 * far + 16, dtype=torch.float16)
    x = held.as_strided((3, 16), (far, 1), 2 * far)
    near = torch.randn(3, 16).half()
    x.copy_(near)
    weight, starts = torch.randn(16, 2).half(), torch.tensor([0, 3], dtype=torch.int32)
    found = []
    for tokens in (x, near):
        states = torch.zeros(1, 16, 1, dtype=torch.float16)
        rest = states, torch.zeros(1, dtype=torch.int32), starts, starts[1:]
        out = kernels.causal_conv.implementation("triton")(tokens, weight, *rest)
        found.append((out, states))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.float32, 11)], ids=str
)
@pytest.mark.usefixtures("dots_in_order")
def test_attention_of_a_sequence_does_not_depend_on_its_batch(
    dtype: torch.dtype, window: int
) -> None:
    """Alone or among others, whole or in chunks, decoded or prefilled: the same bits."""
    lengths = [70, 7]
    q, k, v, starts, context, tables, scale = (
        x.to(DEVICE) if isinstance(x, torch.Tensor) else x
        for x in attention([(n, n) for n in lengths], heads=14, dim=32, dtype=dtype)
    )
    run = kernels.batch_invariant_attention.implementation("triton")
    together = run(q, k, v, starts, context, tables, scale, window)
    for s, length in enumerate(lengths):
        rows, start = q[starts[s] : starts[s + 1]], 0
        for chunk in (4, 2, 1, length - 7):
            stop = start + chunk
            alone = run(
                rows[start:stop],
                k,
                v,
                torch.tensor([0, chunk], dtype=torch.int32, device=DEVICE),
                torch.tensor([stop], dtype=torch.int32, device=DEVICE),
                tables[s : s + 1],
                scale,
                window,
            )
            assert torch.equal(alone, together[starts[s] + start : starts[s] + stop])
            start = stop


def test_the_splits_of_a_long_context_add_up_to_the_whole() -> None:
    arguments = [
        x.to(DEVICE) if isinstance(x, torch.Tensor) else x
        for x in attention([(1, 700), (1, 3)], heads=4, kv_heads=1, dim=32)
    ]
    from rollout.kernels.paged_attention.gpu import Tiles, attend

    sinks = torch.tensor([-1.0, 5.0, 0.0, 2.0], device=DEVICE)
    for rest in ((), (90, 2.0, sinks)):
        wanted = kernels.paged_attention.reference(*arguments, *rest)
        for splits in (1, 2, 8, 32):
            got = attend(*arguments, Tiles(16, 1, 64, splits, warps=4, stages=2), *rest)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_quickened_interpreter_refuses_a_shape_of_floats() -> None:
    """As the other does, though 16.0 finds what was kept for 16."""
    from triton.language import core

    assert core.block_type(core.float32, [16]).shape == (16,)
    with pytest.raises(TypeError, match="Shape element 0"):
        core.block_type(core.float32, [16.0])
