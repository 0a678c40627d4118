"""What a sequence classifier tells apart, and what its logits mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """``names``: of the labels, by index. ``problem_type``: as transformers names it, or ""."""

    names: tuple[str, ...]
    problem_type: str = ""

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of rows of logits [..., labels], by vLLM's rule: a regression's are left as they are; a
        sigmoid of each where several labels may hold, or there is one; else a softmax.
        """
        if self.problem_type == "regression":
            return logits
        wide = logits.astype(np.float64)
        if self.problem_type == "multi_label_classification" or len(self.names) == 1:
            wide = np.exp(-np.logaddexp(0.0, -wide))
        else:
            wide = np.exp(wide - wide.max(-1, keepdims=True))
            wide /= wide.sum(-1, keepdims=True)
        found: NDArray[np.float32] = wide.astype(np.float32)
        return found
