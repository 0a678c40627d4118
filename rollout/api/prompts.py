"""What callers give, as the engine takes it: token ids, with images and videos in their places."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.api.visual_inputs import read_visuals, take_visuals
from rollout.engine.core import EngineCore
from rollout.engine.tokenizer import Tokenizer
from rollout.engine.visuals.processor import VisualProcessor
from rollout.errors import InvalidRequest
from rollout.generation import ChatOptions, PlacedVisual, PromptInput, Visuals
from rollout.rpc.convert import Messages


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation as the engine takes it; ``placed`` is what it ``shows``."""

    text: str
    token_ids: list[int]
    placed: tuple[PlacedVisual, ...] = ()
    shows: Visuals = field(default_factory=Visuals)


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
        self, prompts: Sequence[Sequence[int]], shown: Sequence[Visuals]
    ) -> tuple[list[Sequence[int]], list[tuple[PlacedVisual, ...]]]:
        """Prompts with what they show in its places, which is nothing to do without any."""
        if not any(shown):
            return list(prompts), [()] * len(prompts)
        visuals = self._visuals("the prompt", any(each.videos for each in shown))

        def prepare() -> list[tuple[Sequence[int], tuple[PlacedVisual, ...]]]:
            several = len(prompts) > 1
            return [
                visuals.prepare(ids, own, f"prompt {n}" if several else "the prompt")
                if own
                else (ids, ())
                for n, (ids, own) in enumerate(zip(prompts, shown, strict=True))
            ]

        placed = await asyncio.to_thread(prepare)
        return [ids for ids, _ in placed], [own for _, own in placed]

    async def chats(
        self, conversations: Sequence[Messages], options: ChatOptions
    ) -> list[PreparedChat]:
        """What each conversation is for the engine; what it shows is fetched and placed, too."""
        tokenizer = self.tokenizer("chat")
        remote = self._core.config.allow_remote_images

        def prepare(conversation: Messages) -> PreparedChat:
            messages, parts = take_visuals(conversation)
            visuals = None
            if parts:
                visuals = self._visuals(parts[0].where, any(part.is_video for part in parts))
            text = tokenizer.render_chat(messages, options)
            tokenizer.check_length(text, self._core.max_model_len)
            ids = tokenizer.encode(text, add_special_tokens=False)
            if visuals is None:
                return PreparedChat(text, ids)
            shows = read_visuals(parts, remote)
            ids, placed = visuals.prepare(ids, shows, "the conversation")
            return PreparedChat(text, ids, placed, shows)

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

    def _visuals(self, where: str, are_videos: bool) -> VisualProcessor:
        if self._core.visuals is None:
            what, why = "videos" if are_videos else "images", "sees none"
            if self._core.model_config.vision is not None:
                why = "has no image processor's file"
            raise InvalidRequest(f"{where} has {what}, but {self._core.config.model} {why}")
        return self._core.visuals
