"""What is asked of a generation: a prompt as a user gives it, and as the engine takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.generation.outputs import Completion
from rollout.generation.sampling_params import SamplingParams
from rollout.generation.visuals import PlacedVisual, VisualPrompt, Visuals


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """A prompt that another engine has begun to answer: its samples go on behind what they have.

    ``delivered``: all ``n`` samples, by index; those that have finished stay as they are. With the
    seed that the first engine had, tokens are drawn as that one would have.
    """

    prompt: tuple[int, ...] | VisualPrompt
    delivered: tuple[Completion, ...]


PromptInput = str | Sequence[int]
_NOTHING = Visuals()
AnyPrompt = PromptInput | VisualPrompt | ContinuedPrompt


def parts_of(prompt: AnyPrompt) -> tuple[PromptInput, Visuals, tuple[Completion, ...]]:
    """The text or token ids of a prompt, what it shows, and what was delivered of it."""
    if isinstance(prompt, ContinuedPrompt):
        given, visuals, _ = parts_of(prompt.prompt)
        return given, visuals, prompt.delivered
    if isinstance(prompt, VisualPrompt):
        return prompt.prompt, prompt.visuals, ()
    return prompt, _NOTHING, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, tokenised, with how to continue it.

    ``bad_words``: the token ids of ``params.bad_words``; None until somebody has made them.
    ``visuals``: in the order of their placeholders, which are as many as their parts.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    bad_words: tuple[tuple[int, ...], ...] | None = None
    visuals: tuple[PlacedVisual, ...] = ()
    delivered: tuple[Completion, ...] = ()  # of a ``ContinuedPrompt``
