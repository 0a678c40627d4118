"""What an index chooses, and that attention to all tokens one by one is attention by pages."""

from __future__ import annotations

from itertools import pairwise

import torch
from kernels.backends import backends
from kernels.cases import attention
from torch import Tensor

from rollout.kernels import paged_attention, select_tokens


def test_the_highest_are_chosen_in_order_and_of_equal_ones_the_earlier() -> None:
    q, keys, _, starts, lengths, tables, _ = attention(
        [(7, 40), (1, 3), (1, 70)], heads=2, kv_heads=1, dim=3, block=5
    )
    weights = torch.tensor([1.0, -1.0]).repeat(len(q), 1)
    scores = _scores(q, weights, keys, starts, lengths, tables)
    assert any(row[:-1].eq(0).sum() > 3 for row in scores), "no scores are equal"
    for run in backends(select_tokens).values():
        slots, counts = run(q, weights, keys, starts, lengths, tables, 9)
        assert slots.shape == (len(q), 9)
        row = 0
        for s, (start, stop) in enumerate(pairwise(starts)):
            for position in range(int(lengths[s] - stop + start), int(lengths[s])):
                own = scores[row][: position + 1]
                best = own.argsort(descending=True, stable=True)[:9].sort().values
                wanted = tables[s, best // 5] * 5 + best % 5
                assert int(counts[row]) == len(wanted)
                assert torch.equal(slots[row, : len(wanted)], wanted.int())
                assert not slots[row, len(wanted) :].any()
                row += 1


def test_tokens_one_by_one_are_attended_to_as_pages_of_them_are() -> None:
    q, k, _, starts, lengths, tables, scale = attention(
        [(7, 40), (1, 3), (1, 170)], heads=6, kv_heads=1, dim=26
    )
    weights, rows = torch.ones(len(q), 6), torch.arange(len(q) + 1, dtype=torch.int32)
    slots, counts = select_tokens(q, weights, k, starts, lengths, tables, 170)
    wanted = paged_attention(q, k, k, starts, lengths, tables, scale)
    alone = k.view(-1, 1, 1, 26)
    assert torch.equal(paged_attention(q, alone, alone, rows, counts, slots, scale), wanted)


def _scores(
    q: Tensor, weights: Tensor, keys: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor
) -> list[Tensor]:
    """Of each row, for all tokens of its context."""
    found = []
    for s, length in enumerate(lengths.tolist()):
        positions = torch.arange(length)
        own = keys[tables[s, positions // 5].long(), 0, positions % 5]
        for row in range(int(starts[s]), int(starts[s + 1])):
            found.append((weights[row, :, None] * (q[row] @ own.T).relu()).sum(0))
    return found
