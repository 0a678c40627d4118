"""What is asked of a generation: a prompt as a user gives it, and as the engine takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.generation.images import ImagePrompt, PlacedImage
from rollout.generation.outputs import Completion
from rollout.generation.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """A prompt that another engine has begun to answer: its samples go on behind what they have.

    ``delivered``: all ``n`` samples, by index; those that have finished stay as they are. With the
    seed that the first engine had, tokens are drawn as that one would have.
    """

    prompt: tuple[int, ...] | ImagePrompt
    delivered: tuple[Completion, ...]


PromptInput = str | Sequence[int]
AnyPrompt = PromptInput | ImagePrompt | ContinuedPrompt


def parts_of(
    prompt: AnyPrompt,
) -> tuple[PromptInput, tuple[bytes, ...], tuple[Completion, ...]]:
    """The text or token ids of a prompt, the files of its images, and what was delivered of it."""
    if isinstance(prompt, ContinuedPrompt):
        given, images, _ = parts_of(prompt.prompt)
        return given, images, prompt.delivered
    if isinstance(prompt, ImagePrompt):
        return prompt.prompt, prompt.images, ()
    return prompt, (), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, tokenised, with how to continue it.

    ``bad_words``: the token ids of ``params.bad_words``; None until somebody has made them.
    ``images``: those of its placeholders, which are as many as their parts.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    bad_words: tuple[tuple[int, ...], ...] | None = None
    images: tuple[PlacedImage, ...] = ()
    delivered: tuple[Completion, ...] = ()  # of a ``ContinuedPrompt``
