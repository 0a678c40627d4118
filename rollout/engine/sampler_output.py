"""What one step gave: from the sampler's device through the rank's reply to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.generation import SamplingMask

TopLogprobs = dict[int, float]
_KEPT = ("kept_counts", "kept_ids")
_SIDE = ("hidden", "experts", *_KEPT)
_ROWS = ("tokens", "raw", "processed", "log_kept_mass", "top_ids", "top_logprobs")


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One row per row of logits: the first ``S`` drew their token, the others score a known one.

    Logprobs as in ``Logprobs``. ``top_ids`` and ``top_logprobs``: the k most likely tokens by raw
    logprob, or as the row asks, k the largest number that a row asked for. ``hidden``: of the rows
    that draw and want it, in their order. ``experts``: of the places in the KV cache that the step
    was asked about.
    ``kept_counts`` and ``kept_ids``: of the rows that draw and ask how many tokens were left to
    each, and those, one row's after the other's; 0 where that was the whole vocabulary.
    ``packed``: where a captured step has put what each of its rows has, which all draw: a token,
    and raw, processed and log_kept_mass in the two words behind it.
    ``drafts``: the tokens that were drafted in the step, in the order of its entries; on the host
    from the first, and so beside the other columns on their way there.
    """

    tokens: Tensor  # [R] int64
    raw: Tensor  # [R] float32
    processed: Tensor  # [S] float32
    log_kept_mass: Tensor  # [S] float32
    top_ids: Tensor  # [R, k] int32
    top_logprobs: Tensor  # [R, k] float32
    hidden: Tensor | None = None  # [H, hidden size] float32
    kept_counts: Tensor | None = None  # [K] int32
    kept_ids: Tensor | None = None  # [sum of kept_counts] int32
    experts: Tensor | None = None  # [E, sparse layers, experts of a token] uint8 or int16
    packed: Tensor | None = None  # [R, 3] int64
    drafts: Tensor | None = None  # [D] int64

    @classmethod
    def cat(cls, parts: list[SamplerOutput]) -> SamplerOutput:
        """Rows of all parts, one after the other, without ``hidden``; their ``k`` may differ."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.top_ids.shape[1] for part in parts)

        def column(name: str) -> Tensor:
            tensors = [getattr(part, name) for part in parts]
            if name.startswith("top_"):
                pad = torch.nn.functional.pad
                tensors = [pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]
            return torch.cat(tensors)

        told = [part for part in parts if part.kept_counts is not None]
        kept = {name: torch.cat([getattr(part, name) for part in told]) for name in _KEPT if told}
        return cls(*map(column, _ROWS), **kept)

    def to_host(self) -> Callable[[], SamplerOutput]:
        """Start the copy to the host, of everything at once; the result waits for it, in any
        thread.
        """
        device = self.tokens.device
        if device.type == "cpu":
            return lambda: self
        alone = self.experts is None and self.kept_counts is None and not self.top_ids.shape[1]
        if self.packed is not None and alone:
            words = _to_host(self.packed)
            return lambda: _unpacked(words())
        named, experts = self._columns(), None
        if (kept := named.pop("experts", None)) is not None:  # bytes, and many: as they are
            experts = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
            experts.copy_(kept, non_blocking=True)
        columns = list(named.values())
        packed = torch.cat([column.double().flatten() for column in columns])  # exact for all
        on_host = _to_host(packed)

        def wait() -> SamplerOutput:
            parts = torch.split(on_host(), [column.numel() for column in columns])
            pairs = zip(parts, columns, strict=True)
            found = [part.view(c.shape).to(c.dtype) for part, c in pairs]
            return SamplerOutput(**dict(zip(named, found, strict=True)), experts=experts)

        return wait

    def tensors(self) -> dict[str, Tensor]:
        """For the reply of ``step``; what is empty stays out."""
        return {name: column for name, column in self._columns().items() if column.numel()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> SamplerOutput:
        none = torch.empty(0)
        rows = {name: tensors.get(name, none) for name in _ROWS}
        return cls(
            **rows,
            hidden=tensors.get("hidden"),
            kept_counts=tensors.get("kept_counts"),
            kept_ids=tensors.get("kept_ids"),
            experts=tensors.get("experts"),
            drafts=tensors.get("drafts"),
        )

    def pick(
        self,
        drawn: list[int],
        scored: Iterable[int] = (),
        *,
        experts: list[int] | None = None,
        kept: list[int] | None = None,
    ) -> SamplerOutput:
        """Of rows that drew and rows that score, by their numbers, without ``hidden``.

        ``experts``: which places of those that the step was asked about; ``kept``: which of the
        rows that ask what was left to them. None: all of either.
        """
        every = [*drawn, *scored]

        def column(name: str) -> Tensor:
            whole: Tensor = getattr(self, name)
            rows = drawn if name in ("processed", "log_kept_mass") else every
            return whole[rows] if len(whole) else whole

        found = SamplerOutput(*map(column, _ROWS))
        if self.experts is not None:
            some = self.experts if experts is None else self.experts[experts]
            found = replace(found, experts=some)
        if self.kept_counts is not None:
            sets = self.kept()
            mask = SamplingMask.of(sets if kept is None else [sets[index] for index in kept])
            counts, ids = torch.from_numpy(mask.counts), torch.from_numpy(mask.token_ids)
            found = replace(found, kept_counts=counts, kept_ids=ids)
        return found

    def top(self, row: int, count: int, mode: str = "raw") -> TopLogprobs:
        """The ``count`` most likely tokens of a row, and its own; ``mode``: how it was sampled."""
        found: TopLogprobs = {}
        if count and self.top_ids.numel():
            ids, logprobs = self.top_ids[row, :count], self.top_logprobs[row, :count]
            found = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        if mode == "raw":
            own = float(self.raw[row])
        else:  # one of several that tie is drawn, too
            found = {token: p for token, p in found.items() if p > float("-inf")}
            kept = self.log_kept_mass[row] if mode == "tempered" else 0.0
            own = float(self.processed[row] + kept)  # a float32, as on every wire
        found.setdefault(int(self.tokens[row]), own)
        return found

    def kept(self) -> list[NDArray[np.int32]]:
        """The ids that were left, of each row that asked."""
        if self.kept_counts is None:
            return []
        counts, ids = self.kept_counts.numpy(), self.kept_ids
        flat = np.empty(0, np.int32) if ids is None else ids.numpy()
        return np.split(flat, np.cumsum(counts)[:-1])

    def _columns(self) -> dict[str, Tensor]:
        columns = {name: getattr(self, name) for name in (*_ROWS, *_SIDE)}
        return {name: column for name, column in columns.items() if column is not None}


def _to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start the copy of a GPU's tensor; the result waits for it, in any thread."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    cuda: Any = torch.cuda  # parts of it have no types
    copied, device = cuda.Event(), tensor.device
    copied.record(cuda.current_stream(device))

    def wait() -> Tensor:
        with cuda.device(device):  # a new thread's is the first, where a wait would make a context
            copied.synchronize()
        return host

    return wait


def _unpacked(words: Tensor) -> SamplerOutput:
    """``packed`` on the host as columns."""
    raw, processed, log_kept = words.view(torch.float32)[:, 2:5].unbind(1)
    none = raw.new_empty(len(words), 0)
    return SamplerOutput(words[:, 0], raw, processed, log_kept, none.int(), none)
