"""An image as a caller gives it to a whole file."""

from __future__ import annotations

import base64
import binascii
import os
from io import BytesIO
from pathlib import Path
from typing import Any

from rollout.errors import InvalidRequest


def image_file(image: Any, where: str) -> bytes:
    """The whole file of an image; one of Pillow becomes PNG. Raises ``InvalidRequest``."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str) and image.startswith("data:"):
        return data_uri_bytes(image, where)
    if isinstance(image, os.PathLike):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{where} cannot be read: {error}") from error
    if hasattr(image, "save") and hasattr(image, "convert"):  # Pillow's, which need not be there
        out = BytesIO()
        whole = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
        whole.save(out, format="PNG", compress_level=1)
        return out.getvalue()
    raise InvalidRequest(
        f"{where} is a {type(image).__name__}; give an image of Pillow, a pathlib.Path, a file's "
        "bytes or a data: URI"
    )


def data_uri_bytes(uri: str, where: str) -> bytes:
    """What a base64 ``data:`` URI holds; raises ``InvalidRequest``."""
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidRequest(f"{where} must read data:TYPE;base64,DATA")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where} holds no base64: {error}") from None
