"""A conversation as a trainer takes it, and the arrays that it grows from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout.generation import CUT_SHORT, Completion

NOT_SAMPLED = -1  # in the place of a version


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A conversation as a trainer takes it: the first prompt, and what followed it.

    ``prompt_token_ids`` int64 [p]. All others are over what came after, [n]: ``token_ids`` int64
    with the later messages among the answers; ``mask`` bool, True where a token was sampled (the
    loss mask); ``raw_logprobs``, ``processed_logprobs`` and ``log_kept_mass`` float32, 0 where
    nothing was sampled; ``weight_versions`` int64, -1 there. ``epoch``: in which engine life the
    versions count, None before the first turn. ``finish_reasons``: of each turn's sample, as in
    ``Completion``.
    """

    prompt_token_ids: Tensor
    token_ids: Tensor
    mask: Tensor
    raw_logprobs: Tensor
    processed_logprobs: Tensor
    log_kept_mass: Tensor
    weight_versions: Tensor
    epoch: int | None
    finish_reasons: tuple[str, ...] = ()

    @property
    def is_cut_short(self) -> bool:
        """Whether a turn of it ended by an abort or an error: no whole sample to train on."""
        return any(reason in CUT_SHORT for reason in self.finish_reasons)


@dataclass(slots=True)
class SessionTokens:
    """The ids after a session's first prompt; rows of all arrays belong together."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    mask: bytearray = field(default_factory=bytearray)
    raw: array[float] = field(default_factory=lambda: array("f"))
    processed: array[float] = field(default_factory=lambda: array("f"))
    kept: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("q"))

    def append(self, ids: Sequence[int]) -> None:
        """Ids that nobody sampled."""
        self.ids.extend(ids)
        self.mask.extend(bytes(len(ids)))
        for values in (self.raw, self.processed, self.kept):
            values.extend([0.0] * len(ids))
        self.versions.extend([NOT_SAMPLED] * len(ids))

    def sampled(self, completion: Completion) -> None:
        self.ids.extend(completion.token_ids)
        self.mask.extend(b"\1" * len(completion.token_ids))
        self.raw.extend(completion.logprobs.raw)
        self.processed.extend(completion.logprobs.processed)
        self.kept.extend(completion.logprobs.log_kept_mass)
        for span in completion.weight_versions:
            self.versions.extend([span.version] * (span.stop - span.start))

    def cut(self, length: int) -> None:
        for values in (self.ids, self.mask, self.raw, self.processed, self.kept, self.versions):
            del values[length:]

    def copy(self) -> SessionTokens:
        return SessionTokens(
            self.ids[:],
            self.mask[:],
            self.raw[:],
            self.processed[:],
            self.kept[:],
            self.versions[:],
        )

    def trajectory(
        self, prompt: Sequence[int], epoch: int | None, finish_reasons: tuple[str, ...]
    ) -> Trajectory:
        """All of it as tensors, copied."""

        def tensor(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype)

        return Trajectory(
            prompt_token_ids=tensor(prompt, torch.int64),
            token_ids=tensor(self.ids, torch.int64),
            mask=tensor(self.mask, torch.bool),
            raw_logprobs=tensor(self.raw, torch.float32),
            processed_logprobs=tensor(self.processed, torch.float32),
            log_kept_mass=tensor(self.kept, torch.float32),
            weight_versions=tensor(self.versions, torch.int64),
            epoch=epoch,
            finish_reasons=finish_reasons,
        )
