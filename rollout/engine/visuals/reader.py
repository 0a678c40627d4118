"""Files of images to pixels, with bounds that hold before anything is unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from rollout.errors import ConfigError, InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112  # of EXIF: from 5 on rows and columns are exchanged


def open_image(data: bytes, where: str, max_pixels: int) -> Any:
    """Pillow's image of a file, whose size is known and whose pixels are not read yet.

    Raises ``InvalidRequest`` naming ``where`` for what is no image of ``FORMATS``, and for one of
    more than ``max_pixels`` pixels.
    """
    image_class = pillow()
    try:
        image = image_class.open(BytesIO(data), formats=FORMATS)
    except (image_class.DecompressionBombError, image_class.DecompressionBombWarning):
        raise InvalidRequest(f"{where} has more than max_image_pixels={max_pixels}") from None
    except Exception as error:  # noqa: BLE001 - its parsers raise whatever a file makes them raise
        known = ", ".join(FORMATS)
        raise InvalidRequest(
            f"{where} is no image that can be read, of {known} ({type(error).__name__})"
        ) from None
    width, height = image.size
    if not 0 < width * height <= max_pixels:
        raise InvalidRequest(
            f"{where} has {width} x {height} pixels, more than max_image_pixels={max_pixels}; send "
            "a smaller one"
        )
    return image


def upright_size(image: Any, where: str) -> tuple[int, int]:
    """Width and height of what ``decoded`` gives; of most formats the header alone is read."""
    width, height = image.size
    with _undamaged(where):
        turned = image.getexif().get(_ORIENTATION, 1) >= 5
    return (height, width) if turned else (width, height)


def decoded(image: Any, where: str) -> Any:
    """Its pixels as RGB, turned as its EXIF says (as transformers' and datasets' own readers do),
    of an animation the first picture; raises ``InvalidRequest``.
    """
    from PIL import ImageOps

    with _undamaged(where):
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _undamaged(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - as above: a truncated or damaged file
        raise InvalidRequest(
            f"{where} cannot be decoded ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def pillow() -> Any:
    """The module ``PIL.Image``; ``ConfigError`` where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "images need Pillow: in a checkout, pip install -c constraints.txt -e '.[vision]'"
        ) from error
    return Image
