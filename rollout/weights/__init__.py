"""Nouns of weights: boxes of tensors, the slots they land in, and how parameters lie in memory."""

from rollout.weights.box import Box, Shape
from rollout.weights.layouts import PLAIN, TRANSPOSED, Layout, PlainLayout, TileLayout
from rollout.weights.slots import (
    CASTABLE,
    INTEGERS,
    CellPatch,
    LazyTensor,
    SparsePatch,
    TensorMeta,
    TensorPiece,
    WeightSlot,
    WeightValue,
)

__all__ = [
    "CASTABLE",
    "INTEGERS",
    "PLAIN",
    "TRANSPOSED",
    "Box",
    "CellPatch",
    "Layout",
    "LazyTensor",
    "PlainLayout",
    "Shape",
    "SparsePatch",
    "TensorMeta",
    "TensorPiece",
    "TileLayout",
    "WeightSlot",
    "WeightValue",
]
