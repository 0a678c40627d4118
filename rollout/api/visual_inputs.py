"""Images and videos as callers give them: beside a prompt, and within messages.

A prompt that shows something is vLLM's mapping, ``{"prompt": ..., "multi_modal_data": {"image":
..., "video": ...}}`` (or ``prompt_token_ids``). An image is a file's bytes, a ``pathlib.Path``, an
image of Pillow, or a ``data:`` URI. A plain string is never a path: messages may come from
anywhere. Videos: ``video_inputs``.
"""

from __future__ import annotations

import base64
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.api.image_files import data_uri_bytes, image_file
from rollout.api.video_inputs import as_video, is_frame, video_part
from rollout.errors import InvalidRequest
from rollout.generation import Video, VideoFile, VisualPrompt, Visuals

IMAGE_KINDS = ("image_url", "image", "image_pil", "input_image")  # types of parts that are images
VIDEO_KINDS = ("video_url", "video")
# Those of files that no model here is given; what else there is may be a template's own.
_UNSERVED_KINDS = ("input_video", "audio", "audio_url", "input_audio", "file", "input_file")
FETCH_TIMEOUT = 10.0  # seconds for all of a remote file
MAX_FETCHED = 32 << 20  # bytes of one
REMOTE = ("http://", "https://")
_FIELDS = frozenset(("prompt", "prompt_token_ids", "multi_modal_data"))


def visual_prompt(given: Mapping[str, Any], where: str) -> VisualPrompt:
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
    if not isinstance(data, Mapping) or set(data) - {"image", "video"}:
        raise InvalidRequest(
            f'{where}: multi_modal_data must be {{"image": ..., "video": ...}}, or one of them'
        )
    images, videos = data.get("image"), data.get("video")
    images = [] if images is None else images
    each = list(images) if isinstance(images, list | tuple) else [images]
    shown = Visuals(
        images=tuple(image_file(image, f"{where}: image {n}") for n, image in enumerate(each)),
        videos=tuple(
            as_video(video, f"{where}: video {n}") for n, video in enumerate(_videos(videos))
        ),
    )
    return VisualPrompt(prompt, shown)


def _videos(given: Any) -> list[Any]:
    """The videos of a prompt: a list of them, or one, which may be a list of frames itself."""
    if given is None:
        return []
    if isinstance(given, list) and not (given and is_frame(given[0])):
        return given
    return [given]


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


def has_visuals(messages: Any) -> bool:
    """Whether any part of any message is an image or a video."""
    if not isinstance(messages, Sequence):
        return False
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    kinds = (*IMAGE_KINDS, *VIDEO_KINDS)
    return any(isinstance(part, Mapping) and part.get("type") in kinds for part in parts)


def portable(messages: Any) -> Any:
    """Messages that show ``data:`` URIs alone, so that they are JSON; others as they are."""
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
    if kind == "video":
        return video_part(part, where)
    if kind not in ("image", "image_pil"):
        return part
    image = part.get(kind)
    if isinstance(image, str):
        url = image
    else:
        url = "data:image/png;base64," + base64.b64encode(image_file(image, where)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def part_url(where: str, part: Mapping[str, Any]) -> str:
    """Where the image or the video of a part of a message is; raises ``InvalidRequest`` naming the
    part.
    """
    is_video = part.get("type") in VIDEO_KINDS
    name = "video_url" if is_video else "image_url"
    given = part.get(name, part.get(name.removesuffix("_url")))
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith(("data:", *REMOTE)):
        raise InvalidRequest(
            f"{where} of type {part.get('type')!r} needs {'a' if is_video else 'an'} {name} whose "
            "url is a data: URI, "
            + (
                "data:video/mp4;base64,... or data:video/jpeg;base64,FRAME,FRAME,..."
                if is_video
                else "data:image/png;base64,..."
            )
        )
    return url


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A part of a message that is an image or a video."""

    where: str
    part: Mapping[str, Any]

    @property
    def is_video(self) -> bool:
        return self.part.get("type") in VIDEO_KINDS


def take_visuals(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[ShownPart]]:
    """Messages as a template takes them, and their images and videos, in their order.

    Content of texts alone becomes one text: a template of a model that sees nothing would write
    the list itself. Raises ``InvalidRequest`` naming a part that would be left out.
    """
    found: list[ShownPart] = []
    out = []
    for m, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = []
            for p, part in enumerate(content):
                where = f"messages[{m}].content[{p}]"
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in (*IMAGE_KINDS, *VIDEO_KINDS):
                    part_url(where, part)
                    found.append(ShownPart(where, part))
                    part = {"type": "video" if found[-1].is_video else "image"}
                _check_part(where, part)
                parts.append(part)
            texts = all(part.get("type") == "text" for part in parts)
            message = {
                **message,
                "content": "".join(part["text"] for part in parts) if texts else parts,
            }
        out.append(dict(message))
    return out, found


def read_visuals(shown: Sequence[ShownPart], remote: bool = False) -> Visuals:
    """The files of parts; blocks. Raises ``InvalidRequest`` naming the part."""
    images: list[bytes] = []
    videos: list[Video | VideoFile] = []
    for one in shown:
        url = part_url(one.where, one.part)
        if one.is_video:
            file = fetched(url, one.where, remote) if url.startswith(REMOTE) else url
            videos.append(as_video((file, one.part), one.where))
        else:
            images.append(fetched(url, one.where, remote))
    return Visuals(images=tuple(images), videos=tuple(videos))


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
