"""What one step gave: from the sampler's device through the rank's reply to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TopLogprobs = dict[int, float]
_ROWS = ("tokens", "raw", "processed", "log_kept_mass", "top_ids", "top_logprobs")


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One row per row of logits: the first ``S`` drew their token, the others score a known one.

    Logprobs as in ``Logprobs``. ``top_ids`` and ``top_logprobs``: the k most likely tokens by raw
    logprob, k the largest number that a row asked for. ``hidden``: of the rows that draw and want
    it, in their order.
    """

    tokens: Tensor  # [R] int64
    raw: Tensor  # [R] float32
    processed: Tensor  # [S] float32
    log_kept_mass: Tensor  # [S] float32
    top_ids: Tensor  # [R, k] int32
    top_logprobs: Tensor  # [R, k] float32
    hidden: Tensor | None = None  # [H, hidden size] float32

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

        return cls(*map(column, _ROWS))

    def to_host(self) -> Callable[[], SamplerOutput]:
        """Start the copy to the host, of everything at once; the result waits for it, in any
        thread.
        """
        device = self.tokens.device
        if device.type == "cpu":
            return lambda: self
        named = self._columns()
        columns = list(named.values())
        packed = torch.cat([column.double().flatten() for column in columns])  # exact for all
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        cuda: Any = torch.cuda  # parts of it have no types
        copied = cuda.Event()
        copied.record(cuda.current_stream(device))

        def wait() -> SamplerOutput:
            copied.synchronize()
            parts = torch.split(host, [column.numel() for column in columns])
            pairs = zip(parts, columns, strict=True)
            found = [part.view(c.shape).to(c.dtype) for part, c in pairs]
            return SamplerOutput(**dict(zip(named, found, strict=True)))

        return wait

    def tensors(self) -> dict[str, Tensor]:
        """For the reply of ``step``; what is empty stays out."""
        return {name: column for name, column in self._columns().items() if column.numel()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> SamplerOutput:
        none = torch.empty(0)
        rows = {name: tensors.get(name, none) for name in _ROWS}
        return cls(**rows, hidden=tensors.get("hidden"))

    def rows(self, rows: list[int]) -> SamplerOutput:
        """The rows ``rows`` alone, of a step that only draws."""
        columns = (getattr(self, name) for name in _ROWS)
        return SamplerOutput(*(column[rows] if len(column) else column for column in columns))

    def top(self, row: int, count: int) -> TopLogprobs:
        """The ``count`` most likely tokens of a row, and its own."""
        found: TopLogprobs = {}
        if count and self.top_ids.numel():
            ids, logprobs = self.top_ids[row, :count], self.top_logprobs[row, :count]
            found = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        found.setdefault(int(self.tokens[row]), float(self.raw[row]))
        return found

    def _columns(self) -> dict[str, Tensor]:
        columns = {name: getattr(self, name) for name in (*_ROWS, "hidden")}
        return {name: column for name, column in columns.items() if column is not None}
