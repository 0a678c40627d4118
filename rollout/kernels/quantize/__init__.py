"""Weights in fewer bits; see ``rollout.weights.quantization``."""

from torch import Tensor

from rollout.kernels.op import op
from rollout.weights.quantization import Scheme


@op
def quantize(values: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Floats [n, k] of whole cells as codes and scales: ``Scheme.quantize``, bit for bit."""
    return scheme.quantize(values)
