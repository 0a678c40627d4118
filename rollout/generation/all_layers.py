"""A completion's experts as other engines have them: a row for every layer of the model, zeros for
those without experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.generation.outputs import Completion, RequestOutput


def of_all_layers(output: RequestOutput, completion: Completion) -> NDArray[Any] | None:
    """[tokens, layers, experts of a token]; None where nobody asked."""
    experts, sparse = completion.routed_experts, np.array(output.sparse_layers, bool)
    if experts is None or sparse.all():
        return experts
    tokens, _, chosen = experts.shape
    whole = np.zeros((tokens, len(sparse), chosen), experts.dtype)
    whole[:, sparse] = experts
    return whole
