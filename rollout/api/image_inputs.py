"""Images as callers give them: beside a prompt, and within messages.

A prompt with images is vLLM's mapping, ``{"prompt": ..., "multi_modal_data": {"image": ...}}`` (or
``prompt_token_ids``). An image is a file's bytes, a ``pathlib.Path``, an image of Pillow, or a
``data:`` URI. A plain string is never a path: messages may come from anywhere.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from rollout.errors import InvalidRequest
from rollout.generation import ImagePrompt

IMAGE_KINDS = ("image_url", "image", "image_pil", "input_image")  # types of parts that are images
# Those of files that no model here is given; what else there is may be a template's own.
_UNSERVED_KINDS = (
    *("video", "video_url", "input_video", "audio", "audio_url", "input_audio"),
    *("file", "input_file"),
)
FETCH_TIMEOUT = 10.0  # seconds for all of a remote file
MAX_FETCHED = 32 << 20  # bytes of one
REMOTE = ("http://", "https://")
_FIELDS = frozenset(("prompt", "prompt_token_ids", "multi_modal_data"))


def image_prompt(given: Mapping[str, Any], where: str) -> ImagePrompt:
    """Of vLLM's mapping; raises ``InvalidRequest`` naming what it cannot have."""
    if "role" in given:
        raise InvalidRequest(f"{where} is a message of a chat: use chat(messages)")
    if "input_ids" in given:
        raise InvalidRequest(f'{where} is what a tokenizer makes: pass its ["input_ids"]')
    if unknown := sorted(set(given) - _FIELDS):
        raise InvalidRequest(f"{where} has {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    prompt = given.get("prompt_token_ids", given.get("prompt"))
    if prompt is None or ("prompt" in given and "prompt_token_ids" in given):
        raise InvalidRequest(f"{where} needs either prompt or prompt_token_ids")
    data = given.get("multi_modal_data") or {}
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise InvalidRequest(f'{where}: multi_modal_data must be {{"image": ...}}; images alone')
    images = data.get("image")
    images = [] if images is None else images
    each = list(images) if isinstance(images, list | tuple) else [images]
    return ImagePrompt(
        prompt,
        tuple(image_file(image, f"{where}: image {n}") for n, image in enumerate(each)),
    )


def with_images(prompts: Any, images: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Each prompt with its images, as mappings; raises ``InvalidRequest`` for unequal numbers."""
    if isinstance(images, str | bytes) or not isinstance(images, Sequence):
        raise InvalidRequest(f"images must be a list, got {images!r:.80}")
    one = isinstance(prompts, str) or (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    )
    if not one and not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts must be a list of one for each of images, got {prompts!r:.80}"
        )
    each, lists = ([prompts], [list(images)]) if one else (list(prompts), list(images))
    if len(each) != len(lists):
        raise InvalidRequest(f"{len(lists)} lists of images for {len(each)} prompts")
    return [
        {
            "prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt,
            "multi_modal_data": {"image": own},
        }
        for prompt, own in zip(each, lists, strict=True)
    ]


def has_images(messages: Any) -> bool:
    """Whether any part of any message is an image."""
    if not isinstance(messages, Sequence):
        return False
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS for part in parts)


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
        raise InvalidRequest(f"{where} must read data:image/TYPE;base64,DATA")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where} holds no base64: {error}") from None


def portable(messages: Any) -> Any:
    """Messages whose images are ``data:`` URIs, so that they are JSON; others as they are."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages
    return [
        {**message, "content": [_portable(f"messages[{m}].content[{p}]", part)
                                for p, part in enumerate(message["content"])]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        else message
        for m, message in enumerate(messages)
    ]  # fmt: skip


def _portable(where: str, part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_pil"):
        return part
    image = part.get(kind)
    if isinstance(image, str):
        url = image
    else:
        url = "data:image/png;base64," + base64.b64encode(image_file(image, where)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def part_url(where: str, part: Mapping[str, Any]) -> str:
    """Where the image of a part of a message is; raises ``InvalidRequest`` naming the part."""
    given = part.get("image_url", part.get("image"))
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith(("data:", *REMOTE)):
        raise InvalidRequest(
            f"{where} of type {part.get('type')!r} needs an image_url whose url is a data: URI, "
            "data:image/png;base64,..."
        )
    return url


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages as a template takes them, and (where, URL) of their images, in their order.

    Content of texts alone becomes one text: a template of a model that sees no images would write
    the list itself. Raises ``InvalidRequest`` naming a part that would be left out.
    """
    found: list[tuple[str, str]] = []
    out = []
    for m, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = []
            for p, part in enumerate(content):
                where = f"messages[{m}].content[{p}]"
                if isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS:
                    found.append((where, part_url(where, part)))
                    part = {"type": "image"}
                _check_part(where, part)
                parts.append(part)
            texts = all(part.get("type") == "text" for part in parts)
            message = {
                **message,
                "content": "".join(part["text"] for part in parts) if texts else parts,
            }
        out.append(dict(message))
    return out, found


def _check_part(where: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if kind == "text" else ""
    if not isinstance(part, Mapping) or kind in _UNSERVED_KINDS or not isinstance(text, str):
        raise InvalidRequest(
            f'{where} is a part of type {kind!r}; only {{"type": "text", "text": ...}} and images '
            "are supported"
        )


def fetched(url: str, where: str, remote: bool = False) -> bytes:
    """The file at ``url``; blocks. Raises ``InvalidRequest``, also for what must not be fetched."""
    if url.startswith("data:"):
        return data_uri_bytes(url, where)
    if not remote:
        raise InvalidRequest(
            f"{where} is a remote URL: send a data: URI, or start with --allow-remote-images"
        )
    request = urllib.request.Request(url, headers={"User-Agent": "rollout"})
    deadline, data = time.monotonic() + FETCH_TIMEOUT, b""
    try:
        with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT) as reply:
            while piece := reply.read1(1 << 20):
                data += piece
                if len(data) > MAX_FETCHED:
                    raise InvalidRequest(f"{where} is larger than {MAX_FETCHED} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it takes more than {FETCH_TIMEOUT:g} s")
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, InvalidRequest):  # which is a ValueError
            raise
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the answer, too
        raise InvalidRequest(f"{where} cannot be fetched: {error}") from None
    return data
