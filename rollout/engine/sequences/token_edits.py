"""What a request asks of single tokens of every draw."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.generation import SamplingParams

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """As arrays, which are made once for all samples of a call: each of their steps reads them."""

    bias_ids: Ints
    bias: NDArray[np.float32]  # of each, added to its logit
    allowed: Ints  # empty: all tokens are
    stops: Ints  # not before ``min_tokens`` tokens are out

    @classmethod
    def of(cls, params: SamplingParams, stop_ids: Collection[int]) -> TokenEdits | None:
        """None where nothing is asked."""
        stops = sorted(stop_ids) if params.min_tokens else []
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
        if not (stops or bias or allowed):
            return None
        return cls(
            np.fromiter(bias.keys(), np.int64, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
            np.array(allowed, np.int64),
            np.array(stops, np.int64),
        )
