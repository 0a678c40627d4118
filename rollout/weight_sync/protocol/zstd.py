"""Compression of changes, where Python (3.14 and later) or the ``zstd`` extra brings it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from rollout.errors import ConfigError, TransferFailed

LEVEL = 1  # the fastest: changes are short, and both sides wait for them


def available() -> bool:
    """Whether this process can compress and decompress."""
    return _library() is not None


def compress(data: bytes | memoryview) -> bytes:
    """One frame that says how long ``data`` is."""
    library = _library()
    if library is None:
        raise ConfigError("zstd is not installed: add the extra (pip install -e '.[zstd]')")
    if hasattr(library, "ZstdCompressor") and hasattr(library, "get_frame_parameters"):
        return bytes(library.ZstdCompressor(level=LEVEL).compress(data))
    return bytes(library.compress(data, LEVEL))


def decompress(data: bytes | memoryview, size: int) -> bytes:
    """The ``size`` bytes in one frame; ``TransferFailed`` for anything else.

    No memory is made for a frame that announces another length, or none.
    """
    library = _library()
    if library is None:
        raise TransferFailed("compressed changes came, but zstd is not installed here")
    try:
        if hasattr(library, "get_frame_parameters"):
            announced = library.get_frame_parameters(data).content_size
        else:
            announced = library.get_frame_info(data).decompressed_size
        if announced != size:
            raise TransferFailed(f"a frame of {announced} bytes came where {size} were announced")
        if hasattr(library, "get_frame_parameters"):
            found = library.ZstdDecompressor().decompress(
                data, max_output_size=size, allow_extra_data=False
            )
        else:
            found = library.ZstdDecompressor().decompress(data, max_length=size)
    except (library.ZstdError, ValueError, MemoryError) as error:
        raise TransferFailed(f"compressed changes are damaged: {error}") from error
    if len(found) != size:
        raise TransferFailed(f"{len(found)} bytes came out of a frame of {size}")
    return bytes(found)


@cache
def _library() -> Any:
    for name in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
