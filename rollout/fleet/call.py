"""One call of a fleet's client: what of it is delivered, and how another member goes on with it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    Completion,
    ContinuedPrompt,
    ImagePrompt,
    RequestOutput,
    SamplingParams,
    parts_of,
)
from rollout.rpc.client import RolloutClient

Outputs = AsyncGenerator[tuple[int, RequestOutput]]


@dataclass(slots=True, kw_only=True)
class FleetCall:
    """``options`` are there for conversations. ``begun``: what was delivered last, by row, of a
    stream; ``left``: the rows that have not finished.

    Requests without a seed get one here, so that whichever member goes on draws the same tokens.
    ``sessions``: of each row; the members are not told. ``given``: of each conversation, what
    another engine has answered of it before this call.
    """

    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    request_ids: Sequence[str]
    stream: bool
    options: ChatOptions | None = None
    given: Sequence[tuple[Completion, ...]] | None = None
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
        begun = rows[0] in self.begun
        if self.options is not None and not (begun and all(map(self._is_plain, rows))):
            return client.chat(
                [self.prompts[row] for row in rows], params, ids, self.options,
                stream=self.stream, delivered=[self._delivered(row) for row in rows],
            )  # fmt: skip
        return client.generate([self._prompt(row) for row in rows], params, ids, stream=self.stream)

    def _prompt(self, row: int) -> AnyPrompt:
        """As a member takes it that may have to go on behind what was delivered."""
        last = self.begun.get(row)
        given: AnyPrompt = self.prompts[row]
        if last is None:
            return given
        text, images, _ = parts_of(given)
        whole = ImagePrompt(text, images) if images else tuple(last.prompt_token_ids)
        return ContinuedPrompt(whole, tuple(last.outputs))

    def _delivered(self, row: int) -> tuple[Completion, ...]:
        """Of a conversation."""
        if row in self.begun:
            return tuple(self.begun[row].outputs)
        return () if self.given is None else self.given[row]

    def _is_plain(self, row: int) -> bool:
        """Whether its token ids say all of a conversation: it shows no images."""
        contents = (message.get("content") for message in self.prompts[row])
        return all(isinstance(content, str | None) for content in contents)

    def delivered(self, row: int, output: RequestOutput, epoch: int) -> RequestOutput:
        """``output`` of a member as it leaves the fleet."""
        before = self.begun.get(row)
        if before is None:
            output = replace(output, epoch=epoch)
        else:
            samples = zip(before.outputs, output.outputs, strict=True)
            kept = [old if old.finish_reason is not None else new for old, new in samples]
            scored = max(before.prompt_logprobs or [], output.prompt_logprobs or [], key=len)
            output = replace(
                output, epoch=epoch, prompt=before.prompt, outputs=kept,
                prompt_logprobs=scored or None,
                hidden_state=before.hidden_state or output.hidden_state,
            )  # fmt: skip
        if self.stream:
            self.begun[row] = output
        if output.finished:
            self.left.discard(row)
        return output
