"""What one step gave: tokens, their logprobs and the version of the weights that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.engine.sampling.metadata import SamplingBatch
from rollout.engine.sampling.sampler import Samples

TopLogprobs = dict[int, float]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry per sampling entry of the step, in order; logprobs as in ``Logprobs``.

    ``top[i]``: None where ``logprobs`` was None, else the alternatives and the token itself.
    ``prompt_logprobs``: one per scored prompt position (``ScheduledEntry.prompt_rows``, in the
    order of the entries): the logprobs of the token after it and of the most likely ones.
    """

    version: int
    tokens: list[int]
    raw: list[float]
    processed: list[float]
    log_kept_mass: list[float]
    top: list[TopLogprobs | None]
    prompt_logprobs: list[TopLogprobs]

    def rows(self, rows: list[int]) -> StepOutput:
        """The entries ``rows`` alone, of a step that scores no prompt."""
        return StepOutput(
            version=self.version,
            tokens=[self.tokens[row] for row in rows],
            raw=[self.raw[row] for row in rows],
            processed=[self.processed[row] for row in rows],
            log_kept_mass=[self.log_kept_mass[row] for row in rows],
            top=[self.top[row] for row in rows],
            prompt_logprobs=[],
        )


def encode_step(
    version: int, samples: Samples, batch: SamplingBatch
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The reply of ``step`` on the rank that samples."""
    tensors = {
        "tokens": samples.tokens,
        "raw": samples.raw,
        "processed": samples.processed,
        "log_kept_mass": samples.log_kept_mass,
    }
    if (batch.num_top >= 0).any():
        tensors["num_top"] = torch.from_numpy(batch.num_top)
        tensors["top_ids"] = samples.top_ids
        tensors["top_logprobs"] = samples.top_logprobs
    return {"version": version}, tensors


def decode_step(reply: tuple[Mapping[str, Any], Mapping[str, Tensor]]) -> StepOutput:
    """Read rank 0's reply; other ranks answer with their version alone."""
    header, tensors = reply
    count = len(tensors["processed"])
    tokens, raw = tensors["tokens"].tolist(), tensors["raw"].tolist()
    top: list[TopLogprobs | None] = [None] * len(tokens)
    if "num_top" in tensors:
        ids, logprobs = tensors["top_ids"].numpy(), tensors["top_logprobs"].numpy()
        num_top = tensors["num_top"].numpy()
        for row in np.flatnonzero(num_top >= 0):
            k = num_top[row]
            top[row] = dict(zip(ids[row, :k].tolist(), logprobs[row, :k].tolist(), strict=True))
            top[row].setdefault(tokens[row], raw[row])  # type: ignore[union-attr]
    return StepOutput(
        version=int(header["version"]),
        tokens=tokens[:count],
        raw=raw[:count],
        processed=tensors["processed"].tolist(),
        log_kept_mass=tensors["log_kept_mass"].tolist(),
        top=top[:count],
        prompt_logprobs=[row for row in top[count:] if row is not None],
    )
