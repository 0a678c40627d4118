"""One call of a fleet's client: what of it is delivered, and how another member goes on with it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.generation import (
    ChatOptions,
    ContinuedPrompt,
    ImagePrompt,
    RequestOutput,
    SamplingParams,
)
from rollout.rpc.client import RolloutClient

Outputs = AsyncGenerator[tuple[int, RequestOutput]]


@dataclass(slots=True, kw_only=True)
class FleetCall:
    """``options`` are there for conversations. ``begun``: what was delivered last, by row, of a
    stream; ``left``: the rows that have not finished.

    Requests without a seed get one here, so that whichever member goes on draws the same tokens.
    ``sessions``: of each row; the members are not told.
    """

    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    request_ids: Sequence[str]
    stream: bool
    options: ChatOptions | None = None
    begun: dict[int, RequestOutput] = field(default_factory=dict)
    left: set[int] = field(init=False)
    sessions: Sequence[str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.left = set(range(len(self.prompts)))
        self.sessions = [p.session_id for p in self.params]
        self.params = [
            replace(p, seed=secrets.randbits(62) if p.seed is None else p.seed, session_id=None)
            for p in self.params
        ]

    def outputs(self, client: RolloutClient, rows: Sequence[int]) -> Outputs:
        """Of these rows by a member: all are new, or all have begun elsewhere."""
        params = [self.params[row] for row in rows]
        ids = [self.request_ids[row] for row in rows]
        if rows[0] in self.begun:
            last = [self.begun[row] for row in rows]
            prompts = [ContinuedPrompt(tuple(o.prompt_token_ids), tuple(o.outputs)) for o in last]
            return client.generate(prompts, params, ids, stream=self.stream)
        given = [self.prompts[row] for row in rows]
        if self.options is not None:
            return client.chat(given, params, ids, self.options, stream=self.stream)
        return client.generate(given, params, ids, stream=self.stream)

    def can_go_on(self, row: int) -> bool:
        """Whether another member can take the row over: a new one, or a stream of plain tokens."""
        if row not in self.begun:
            return True
        params, prompt = self.params[row], self.prompts[row]
        special = params.structured_outputs, params.hidden_state or None, params.prompt_logprobs
        return all(value is None for value in special) and not _has_images(prompt)

    def delivered(self, row: int, output: RequestOutput, epoch: int) -> RequestOutput:
        """``output`` of a member as it leaves the fleet."""
        before = self.begun.get(row)
        if before is None:
            output = replace(output, epoch=epoch)
        else:
            samples = zip(before.outputs, output.outputs, strict=True)
            kept = [old if old.finish_reason is not None else new for old, new in samples]
            output = replace(output, epoch=epoch, prompt=before.prompt, outputs=kept)
        if self.stream:
            self.begun[row] = output
        if output.finished:
            self.left.discard(row)
        return output


def _has_images(prompt: Any) -> bool:
    """Of a prompt, or of a conversation."""
    if isinstance(prompt, ImagePrompt):
        return True
    messages = prompt if not isinstance(prompt, str) else ()
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    return any(not isinstance(content, str | None) for content in contents)
