"""What callers give, as the engine takes it: token ids, with images in their places."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.api.image_inputs import fetched, take_images
from rollout.engine.core import EngineCore
from rollout.engine.images.processor import ImageProcessor
from rollout.engine.tokenizer import Tokenizer
from rollout.errors import InvalidRequest
from rollout.generation import ChatOptions, PlacedImage, PromptInput
from rollout.rpc.convert import Messages


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation as the engine takes it; ``files`` are those of its ``images``."""

    text: str
    token_ids: list[int]
    images: tuple[PlacedImage, ...] = ()
    files: Sequence[bytes] = ()


class PromptPreparer:
    """Tokenises, fetches and decodes in threads of the loop's pool, never in the loop."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    async def token_ids(self, prompts: Sequence[PromptInput]) -> list[Sequence[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        tokenizer = self.tokenizer("a text prompt")
        for text in texts:
            tokenizer.check_length(text, self._core.max_model_len)
        encode = tokenizer.encode
        encoded = iter(await asyncio.to_thread(lambda: [encode(text) for text in texts]))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def placed(
        self, prompts: Sequence[Sequence[int]], files: Sequence[Sequence[bytes]]
    ) -> tuple[list[Sequence[int]], list[tuple[PlacedImage, ...]]]:
        """Prompts with their images in their places, which is nothing to do without any."""
        if not any(files):
            return list(prompts), [()] * len(prompts)
        images = self._images("the prompt")

        def prepare() -> list[tuple[Sequence[int], tuple[PlacedImage, ...]]]:
            several = len(prompts) > 1
            return [
                images.prepare(ids, own, f"prompt {n}" if several else "the prompt")
                if own
                else (ids, ())
                for n, (ids, own) in enumerate(zip(prompts, files, strict=True))
            ]

        placed = await asyncio.to_thread(prepare)
        return [ids for ids, _ in placed], [own for _, own in placed]

    async def chats(
        self, conversations: Sequence[Messages], options: ChatOptions
    ) -> list[PreparedChat]:
        """What each conversation is for the engine; images are fetched and placed, too."""
        tokenizer = self.tokenizer("chat")
        remote = self._core.config.allow_remote_images

        def prepare(conversation: Messages) -> PreparedChat:
            messages, urls = take_images(conversation)
            images = self._images(urls[0][0]) if urls else None
            text = tokenizer.render_chat(messages, options)
            tokenizer.check_length(text, self._core.max_model_len)
            ids = tokenizer.encode(text, add_special_tokens=False)
            if images is None:
                return PreparedChat(text, ids)
            files = [fetched(url, where, remote) for where, url in urls]
            ids, placed = images.prepare(ids, files, "the conversation")
            return PreparedChat(text, ids, placed, files)

        return await asyncio.to_thread(lambda: [prepare(one) for one in conversations])

    def tokenizer(self, what: str) -> Tokenizer:
        if self._core.tokenizer is None:
            why, remedy = f"{self._core.config.model} has none", "with tokenizer=DIRECTORY"
            if self._core.config.skip_tokenizer_init:
                why = "this engine was started with skip_tokenizer_init=True"
                remedy = "without that"
            raise InvalidRequest(
                f"{what} needs a tokenizer, but {why}: send token ids, or start the engine {remedy}"
            )
        return self._core.tokenizer

    def _images(self, where: str) -> ImageProcessor:
        if self._core.images is None:
            why = "has no image processor's file" if self._core.model_config.vision else "sees none"
            raise InvalidRequest(f"{where} has images, but {self._core.config.model} {why}")
        return self._core.images
