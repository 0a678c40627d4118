"""One call of a fleet's client: what of it is delivered, and how another member goes on with it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.fleet.calls.beginning import Beginning
from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    Completion,
    ContinuedPrompt,
    Logprobs,
    PromptInput,
    RequestOutput,
    SamplingParams,
    VisualPrompt,
    parts_of,
)
from rollout.generation.sampling_params import MAX_INT
from rollout.rpc.client import RolloutClient

Outputs = AsyncGenerator[tuple[int, RequestOutput]]
INTERVAL = 64  # tokens of a sample after which a call that is not streamed hears how far it is


@dataclass(slots=True, kw_only=True)
class FleetCall:
    """``options`` are there for conversations. ``begun``: what was delivered last, by row, of a
    stream, or told of what is not streamed; ``left``: the rows that have not finished; ``told``:
    those of which a member tells before their end, so that they can go on elsewhere behind it.

    Requests without a seed get one here, so that whichever member goes on draws the same tokens.
    Members are told digests alone of what it is known by. ``given``: of each conversation, what
    another engine has answered of it before this call. ``fleet``: whose members may answer.
    ``aborted``: the rows that end here, unless a member has them (``placed``), which ends them.
    """

    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    request_ids: Sequence[str]
    stream: bool
    options: ChatOptions | None = None
    given: Sequence[tuple[Completion, ...]] | None = None
    fleet: int = 0
    begun: dict[int, RequestOutput] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    placed: set[int] = field(default_factory=set)
    has_moved: bool = False  # whether a member has gone on with what another had begun
    left: set[int] = field(init=False)
    told: set[int] = field(init=False)
    _sessions: Sequence[str | None] = field(init=False)
    _beginnings: dict[int, Beginning] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.left = set(range(len(self.prompts)))
        self.told = {row for row in self.left if self.stream or self._is_long(row)}
        self._sessions = [p.session_id for p in self.params]
        self.params = [
            replace(
                p,
                seed=secrets.randbits(62) if p.seed is None else p.seed,
                session_id=None,
                stream_interval=p.stream_interval if self.stream else self._interval(row),
            )
            for row, p in enumerate(self.params)
        ]

    def beginning(self, row: int) -> Beginning:
        """What the row's prompt is known by, as it came."""
        if row not in self._beginnings:
            group = self.params[row].group_id
            self._beginnings[row] = Beginning.of(self.prompts[row], self._sessions[row], group)
        return self._beginnings[row]

    def outputs(self, client: RolloutClient, rows: Sequence[int]) -> Outputs:
        """Of these rows by a member, each new, or begun elsewhere.

        Of what is not streamed outputs that have not finished may come, too.
        """
        stream = self.stream or (
            "intervals" in client.features and any(row in self.told for row in rows)
        )
        params = [self.params[row] for row in rows]
        ids = [self.request_ids[row] for row in rows]
        begun = [row in self.begun for row in rows]
        self.has_moved |= any(begun)
        said: Any = {
            "stream": stream,
            "fleet": self.fleet,
            "beginnings": [b"".join(self.beginning(row).keys) for row in rows],
        }
        if self.options is not None and not (all(begun) and all(map(self._is_plain, rows))):
            return client.chat(
                [self.prompts[row] for row in rows], params, ids, self.options,
                delivered=[self._delivered(row) for row in rows], **said,
            )  # fmt: skip
        return client.generate([self._prompt(row) for row in rows], params, ids, **said)

    def abort(self, request_ids: Collection[str] | None) -> int:
        """These requests, or all; returns how many of them no member has, which would count it."""
        given = self.request_ids if request_ids is None else request_ids
        rows = {row for row in self.left if self.request_ids[row] in given} - self.aborted
        self.aborted |= rows
        return len(rows - self.placed)

    def is_aborted(self, rows: Collection[int]) -> bool:
        """Whether nobody is waited for by these: all of them are to end."""
        return self.aborted.issuperset(rows)

    def ended(self, rows: Sequence[int], epoch: int) -> list[tuple[int, RequestOutput]]:
        """The last outputs of those of ``rows`` that are aborted: what was delivered of them."""
        return [
            (row, self.delivered(row, self._cut_short(row), epoch))
            for row in rows
            if row in self.aborted
        ]

    def forget(self, epoch: int, version: int, parted: int) -> None:
        """Of what is not streamed have rows begin anew whose tokens may not stand beside those of
        the live ``version``: of another epoch; of an older version, where the row is pinned; of one
        below ``parted``, whose update let nothing go on from an older one.
        """
        for row in () if self.stream else list(self.begun):
            output = self.begun[row]
            versions = {s.version for one in output.outputs for s in one.weight_versions}
            is_old = any(one < parted for one in versions)
            if self.params[row].pin:
                is_old = versions != {version}
            if is_old or output.epoch != epoch:
                del self.begun[row]

    def delivered(self, row: int, output: RequestOutput, epoch: int) -> RequestOutput:
        """``output`` of a member as it leaves the fleet."""
        before = self.begun.get(row)
        if before is None or not (self.has_moved or len(before.outputs) > 1):
            output.epoch = epoch  # ours alone: a copy would take longer
        else:
            samples = zip(before.outputs, output.outputs, strict=True)
            kept = [old if old.finish_reason is not None else new for old, new in samples]
            scored = max(before.prompt_logprobs or [], output.prompt_logprobs or [], key=len)
            output = replace(
                output, epoch=epoch, prompt=before.prompt, outputs=kept,
                prompt_logprobs=scored or None,
                hidden_state=before.hidden_state or output.hidden_state,
            )  # fmt: skip
        if row in self.told:
            self.begun[row] = output
        if output.finished:
            self.left.discard(row)
        return output

    # ---- helpers ----

    def _prompt(self, row: int) -> AnyPrompt:
        """As a member takes it that may have to go on behind what was delivered."""
        last = self.begun.get(row)
        given: AnyPrompt = self.prompts[row]
        if last is None:
            return given
        text, visuals, _ = parts_of(given)
        whole = VisualPrompt(text, visuals) if visuals else tuple(last.prompt_token_ids)
        return ContinuedPrompt(whole, tuple(last.outputs))

    def _delivered(self, row: int) -> tuple[Completion, ...]:
        """Of a conversation."""
        return tuple(self.begun[row].outputs) if row in self.begun else self._before(row)

    def _cut_short(self, row: int) -> RequestOutput:
        """As a member ends an aborted request; without its prompt's tokens where none has said
        them.
        """
        last = self.begun.get(row)
        if last is None:
            prompt = parts_of(self.prompts[row])[0] if self.options is None else ()
            last = _nothing(self.request_ids[row], prompt, self.params[row].n)
            if done := self._before(row):
                last = replace(last, outputs=list(done))
        cut = [
            replace(one, finish_reason="abort") if one.finish_reason is None else one
            for one in last.outputs
        ]
        return replace(last, outputs=cut, finished=True)

    def _before(self, row: int) -> tuple[Completion, ...]:
        """What was delivered of it before this call."""
        if self.options is None:
            return parts_of(self.prompts[row])[2]
        return () if self.given is None else self.given[row]

    def _is_plain(self, row: int) -> bool:
        """Whether its token ids say all of a conversation: it shows nothing beside them."""
        contents = (message.get("content") for message in self.prompts[row])
        return all(isinstance(content, str | None) for content in contents)

    def _is_long(self, row: int) -> bool:
        """Whether what is not streamed is told of: it has something to lose, and brings nothing
        that would come whole each time.
        """
        params = self.params[row]
        scores = params.prompt_logprobs is not None or params.hidden_state
        heavy = scores or params.return_routed_experts or params.return_sampling_mask
        return not heavy and (params.max_tokens is None or params.max_tokens > INTERVAL)

    def _interval(self, row: int) -> int:
        """Of what is not streamed; the others of a member's call are asked for nothing before
        their end.
        """
        return INTERVAL if row in self.told else MAX_INT


def _nothing(request_id: str, prompt: PromptInput, n: int) -> RequestOutput:
    """What a request has of which no member has told."""
    text, ids = (prompt, []) if isinstance(prompt, str) else (None, list(prompt))
    samples = [
        Completion(
            index=index, text="", token_ids=[], logprobs=Logprobs([], [], []),
            cumulative_logprob=0.0, finish_reason=None, stop_reason=None, weight_versions=(),
            kv_spans=(),
        )
        for index in range(n)
    ]  # fmt: skip
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=ids, prompt_logprobs=None,
        outputs=samples, finished=False, num_cached_tokens=0,
    )  # fmt: skip
