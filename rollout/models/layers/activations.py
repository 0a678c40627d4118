"""Activations whose bits do not depend on where an element lies.

torch's sigmoid, SiLU and tanh GELU compute the elements that fill no vector in another way than the
others, so that a row's bits depend on the rows before it; its exponential and its tanh do not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    wide = x.float()
    return (1 / (1 + torch.exp(-wide))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)
