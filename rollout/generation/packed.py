"""Arrays as plain values: base64, dtype and shape, for bodies and messages in JSON."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXPERT_DTYPES = ("uint8", "int16", "uint16", "int32", "int64")
MAX_EXPERTS = 1 << 15  # of a layer: their numbers fit int16


def pack(array: NDArray[Any]) -> dict[str, Any]:
    """``{"data", "shape", "dtype"}``: the bytes in C order and base64, and numpy's name."""
    data = base64.b64encode(np.ascontiguousarray(array).data).decode("ascii")
    return {"data": data, "shape": list(array.shape), "dtype": array.dtype.name}


def unpack(packed: Mapping[str, Any], dtypes: tuple[str, ...], dims: int) -> NDArray[Any]:
    """What ``pack`` made; raises ValueError with what it "must ..." be."""
    if set(packed) != {"data", "shape", "dtype"}:
        raise ValueError("have data (base64), shape and dtype")
    shape, dtype = packed["shape"], packed["dtype"]
    if dtype not in dtypes:
        raise ValueError(f"have a dtype of {', '.join(dtypes)}")
    if (
        not isinstance(shape, list | tuple)
        or len(shape) != dims
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise ValueError(f"have {dims} dimensions")
    try:
        data = base64.b64decode(packed["data"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError("have data in base64") from None
    if len(data) != prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"have as many bytes as {dtype} {list(shape)} takes")
    return np.frombuffer(data, dtype).reshape(shape)


def read_experts(value: Any) -> dict[str, Any] | None:
    """Experts to route to, an integer array or what ``pack`` made of one, as ``pack`` makes it.

    [tokens, layers with experts, experts of a token]; raises ValueError as readers of parameters.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        array = unpack(value, _EXPERT_DTYPES, 3)
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(_SHAPE) from None
        if array.ndim != 3 or array.dtype.kind not in "iu":
            raise ValueError(_SHAPE)
    if array.size and not 0 <= array.min() <= array.max() < MAX_EXPERTS:
        raise ValueError(f"name experts in 0..{MAX_EXPERTS - 1}")
    return pack(array.astype(np.int16))


def experts_of(packed: Mapping[str, Any]) -> NDArray[np.int16]:
    """What ``read_experts`` has read."""
    return unpack(packed, _EXPERT_DTYPES, 3)


_SHAPE = "be integers of shape [tokens, layers with experts, experts of a token]"
