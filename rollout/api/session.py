"""Conversations of several turns that continue exact token ids: nothing is tokenised twice.

A turn's prompt is every id of the turns before, as the engine saw and sampled them, and after it
the new messages alone. What a chat template puts around them is found by rendering the history
with a mark in the place of the last answer: what comes after the mark is text that no turn has had
yet. It is tokenised by itself and appended, less an end token that was already sampled.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.api.backend import Backend
from rollout.chat import ChatOptions
from rollout.errors import EngineOverloaded, EngineRestarted, InvalidRequest
from rollout.generation import Completion, PromptInput, RequestOutput, SamplingParams
from rollout.rpc.convert import Messages

R = TypeVar("R")
OneParams = SamplingParams | Mapping[str, Any]

NOT_SAMPLED = -1  # in the place of a version

# What the server keeps for clients that name their sessions.
MAX_SESSIONS = 4096
MAX_TOKENS = 8 << 20  # of all sessions; some 40 bytes each
IDLE_SECONDS = 3600.0
_LONGEST_ID = 256


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A conversation as a trainer takes it: the first prompt, and what followed it.

    ``prompt_token_ids`` int64 [p]. All others are over what came after, [n]: ``token_ids`` int64
    with the later messages among the answers; ``mask`` bool, True where a token was sampled (the
    loss mask); ``raw_logprobs``, ``processed_logprobs`` and ``log_kept_mass`` float32, 0 where
    nothing was sampled; ``weight_versions`` int64, -1 there. ``epoch``: in which engine life the
    versions count, None before the first turn.
    """

    prompt_token_ids: Tensor
    token_ids: Tensor
    mask: Tensor
    raw_logprobs: Tensor
    processed_logprobs: Tensor
    log_kept_mass: Tensor
    weight_versions: Tensor
    epoch: int | None


@dataclass(slots=True)
class _Tokens:
    """The ids after the first prompt; rows of all arrays belong together."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    mask: bytearray = field(default_factory=bytearray)
    raw: array[float] = field(default_factory=lambda: array("f"))
    processed: array[float] = field(default_factory=lambda: array("f"))
    kept: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("q"))

    def append(self, ids: Sequence[int]) -> None:
        """Ids that nobody sampled."""
        self.ids.extend(ids)
        self.mask.extend(bytes(len(ids)))
        for values in (self.raw, self.processed, self.kept):
            values.extend([0.0] * len(ids))
        self.versions.extend([NOT_SAMPLED] * len(ids))

    def sampled(self, completion: Completion) -> None:
        self.ids.extend(completion.token_ids)
        self.mask.extend(b"\1" * len(completion.token_ids))
        self.raw.extend(completion.logprobs.raw)
        self.processed.extend(completion.logprobs.processed)
        self.kept.extend(completion.logprobs.log_kept_mass)
        for span in completion.weight_versions:
            self.versions.extend([span.version] * (span.stop - span.start))

    def cut(self, length: int) -> None:
        for values in (self.ids, self.mask, self.raw, self.processed, self.kept, self.versions):
            del values[length:]

    def copy(self) -> _Tokens:
        return _Tokens(
            self.ids[:],
            self.mask[:],
            self.raw[:],
            self.processed[:],
            self.kept[:],
            self.versions[:],
        )


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn's beginning: what ``rewind`` goes back to. ``ended``: by a token it sampled."""

    messages: int
    tokens: int
    ended: bool
    templated: bool


class AsyncSession:
    """A conversation; made by ``AsyncRollout.session``. A turn that fails leaves it as it was.

    ``chat`` takes messages, which the chat template surrounds; ``generate`` takes text or token
    ids, appended as they are. One turn runs at a time, with one sample (``n=1``): ``fork`` before
    a turn that is to have several.
    """

    def __init__(self, backend: Backend, options: ChatOptions) -> None:
        self._backend = backend
        self.options = options  # of its later turns, too
        self._messages: list[dict[str, Any]] = []
        self._templated = True  # until raw tokens come, of which no template knows
        self._prompt: list[int] = []
        self._tokens = _Tokens()
        self._turns: list[_Turn] = []
        self._texts: list[str] = []  # of each turn's answer
        self._epoch: int | None = None
        self._running = False

    # ---- turns ----

    async def chat(self, messages: Messages, params: OneParams | None = None) -> RequestOutput:
        """The answer to ``messages``: those of this turn alone (a tool's results, a user's words).

        The output's ``prompt_token_ids`` are the whole context that the engine saw. Raises
        ``InvalidRequest`` where the template does not let the ids so far be continued.
        """
        return await _last(self.stream_chat(messages, params, stream=False))

    async def generate(
        self, prompt: PromptInput = (), params: OneParams | None = None
    ) -> RequestOutput:
        """Go on after ``prompt``, which is appended as it is; without it, right where it ended."""
        return await _last(self.stream(prompt, params, stream=False))

    async def stream_chat(
        self,
        messages: Messages,
        params: OneParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """As ``chat``, with cumulative outputs; leaving the loop early undoes the turn."""
        new = _as_messages(messages, first=not self._turns)
        with self._one_turn():
            ids = await self._ids_of(new)
            if self._turns and self._turns[-1].ended and ids[:1] == [self._tokens.ids[-1]]:
                ids = ids[1:]  # the template's end of the answer: it was sampled
            async for output in self._run(ids, params, request_id, stream, new):
                yield output

    async def stream(
        self,
        prompt: PromptInput = (),
        params: OneParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """As ``generate``, with cumulative outputs; leaving the loop early undoes the turn."""
        with self._one_turn():
            if isinstance(prompt, str):
                await self._backend.start()
                first = not self._turns  # the tokenizer's own rule decides about a BOS there
                ids = await self._backend.tokenize(prompt, first) if prompt else []
            else:
                ids = list(prompt)
            async for output in self._run(ids, params, request_id, stream, None):
                yield output

    # ---- what it holds ----

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, the engine's answers as {"role": "assistant", ...}."""
        return [dict(message) for message in self._messages]

    @property
    def text(self) -> str:
        """What the engine's answers said, one after the other."""
        return "".join(self._texts)

    @property
    def running(self) -> bool:
        """Whether a turn is under way."""
        return self._running

    @property
    def token_ids(self) -> list[int]:
        """Every id so far: what the next turn continues."""
        return [*self._prompt, *self._tokens.ids]

    @property
    def num_tokens(self) -> int:
        return len(self._prompt) + len(self._tokens.ids)

    def trajectory(self) -> Trajectory:
        """The whole conversation as tensors, copied."""
        of = self._tokens

        def tensor(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype)

        return Trajectory(
            prompt_token_ids=tensor(self._prompt, torch.int64),
            token_ids=tensor(of.ids, torch.int64),
            mask=tensor(of.mask, torch.bool),
            raw_logprobs=tensor(of.raw, torch.float32),
            processed_logprobs=tensor(of.processed, torch.float32),
            log_kept_mass=tensor(of.kept, torch.float32),
            weight_versions=tensor(of.versions, torch.int64),
            epoch=self._epoch,
        )

    def fork(self) -> AsyncSession:
        """Another session that goes on from here: a group of samples of one turn, a branch."""
        other = AsyncSession(self._backend, self.options)
        other._messages, other._templated = self.messages, self._templated
        other._prompt, other._tokens = list(self._prompt), self._tokens.copy()
        other._turns, other._epoch = list(self._turns), self._epoch
        other._texts = list(self._texts)
        return other

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns, their messages and answers; the ids before them stay exact."""
        if not 1 <= turns <= len(self._turns):
            raise InvalidRequest(f"cannot forget {turns} turns of {len(self._turns)}")
        with self._one_turn():
            turn = self._turns[-turns]
            del self._turns[-turns:], self._texts[-turns:], self._messages[turn.messages :]
            self._tokens.cut(turn.tokens)
            self._templated = turn.templated
            if not self._turns:
                self._prompt, self._epoch = [], None

    def rewind_to(self, messages: Messages) -> int:
        """How many of ``messages`` are this session's; turns that go beyond these are forgotten.

        For a client that sends the whole conversation each time: it may go on, ask for an answer
        again, or branch off earlier. What it says that the engine answered must be what the engine
        did answer. Else the history was edited, and nobody has sampled ids of its text:
        ``InvalidRequest``.
        """
        have = self._messages
        pairs = zip(have, messages, strict=False)
        known = next((n for n, pair in enumerate(pairs) if not _same(*pair)), None)
        if known is None:
            known = min(len(have), len(messages))
        if known == len(have):
            return known
        back, turn = next(
            (back, turn)
            for back, turn in enumerate(reversed(self._turns), 1)
            if turn.messages <= known
        )
        if len(messages) == turn.messages:
            raise InvalidRequest("the conversation ends with an answer; there is nothing to answer")
        if any(message.get("role") == "assistant" for message in messages[known:]):
            raise InvalidRequest(
                f"messages[{known}] is not what this session has there: the history was edited, "
                "and the ids that were sampled are not those of its text; begin another session, "
                "or send X-Session-Restart: true to tokenise the whole text anew"
            )
        self.rewind(back)
        return turn.messages

    # ---- helpers ----

    async def _ids_of(self, new: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of ``new`` with what the template puts around them."""
        await self._backend.start()
        if not self._templated:
            raise InvalidRequest(
                "this session went on with raw tokens, of which its chat template knows nothing; "
                "go on with generate"
            )
        if not self._turns:
            text = await self._backend.render(new, self.options)
            return await self._backend.tokenize(text, False)
        mark = f"mark{uuid.uuid4().hex}"
        history = [*self._messages[:-1], {**self._messages[-1], "content": mark}, *new]
        text = await self._backend.render(history, self.options)
        _, found, after = text.partition(mark)
        if not found or mark in after:
            raise InvalidRequest(
                "the chat template does not show the last answer exactly once before the new "
                "messages, so that the ids so far cannot be continued by it; use generate with "
                "token ids"
            )
        return await self._backend.tokenize(after, False)

    async def _run(
        self,
        added: Sequence[int],
        params: OneParams | None,
        request_id: str | None,
        stream: bool,
        messages: Sequence[Mapping[str, Any]] | None,
    ) -> AsyncGenerator[RequestOutput]:
        await self._backend.start()
        one = SamplingParams.of(params)
        if one.n != 1:
            raise InvalidRequest(f"a turn of a session has one sample, not n={one.n}: fork it")
        prompt, name = [*self.token_ids, *added], request_id or uuid.uuid4().hex
        outputs = self._backend.generate([prompt], [one], [name], stream=stream)
        async with aclosing(outputs):
            async for _, output in outputs:
                if output.finished:
                    self._record(added, output, messages)
                yield output

    def _record(
        self,
        added: Sequence[int],
        output: RequestOutput,
        messages: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        if self._epoch not in (None, output.epoch):
            raise EngineRestarted(
                f"the engine has restarted (epoch {output.epoch}): the versions of this session "
                "count in another life of it; begin a new session"
            )
        [completion] = output.outputs
        ended = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        turn = _Turn(len(self._messages), len(self._tokens.ids), ended, self._templated)
        if self._turns:
            self._tokens.append(added)
        else:
            self._prompt = list(output.prompt_token_ids)
        self._tokens.sampled(completion)
        self._turns.append(turn)
        self._texts.append(completion.text)
        self._epoch = output.epoch
        if messages is not None:
            answer = {"role": "assistant", "content": completion.text}
            self._messages += [*map(dict, messages), answer]
        else:
            self._templated = False

    @contextmanager
    def _one_turn(self) -> Iterator[None]:
        if self._running:
            raise InvalidRequest("a turn of this session is under way: a session has one at a time")
        self._running = True
        try:
            yield
        finally:
            self._running = False


class Session:
    """A conversation; made by ``Rollout.session``. The verbs of ``AsyncSession``, blocking.

    It continues exact token ids: what was sampled is never tokenised again. A turn that fails
    leaves it as it was. ``session`` is the awaitable one behind it.
    """

    def __init__(
        self, session: AsyncSession, run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self.session = session
        self._call = run

    def chat(self, messages: Messages, params: OneParams | None = None) -> RequestOutput:
        """The answer to ``messages``: those of this turn alone (a tool's results, a user's words).

        The output's ``prompt_token_ids`` are the whole context that the engine saw.
        """
        output: RequestOutput = self._call(self.session.chat(messages, params))
        return output

    def generate(self, prompt: PromptInput = (), params: OneParams | None = None) -> RequestOutput:
        """Go on after ``prompt``, which is appended as it is; without it, right where it ended."""
        output: RequestOutput = self._call(self.session.generate(prompt, params))
        return output

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, with the engine's answers."""
        return self.session.messages

    @property
    def text(self) -> str:
        """What the engine's answers said, one after the other."""
        return self.session.text

    @property
    def token_ids(self) -> list[int]:
        """Every id so far: what the next turn continues."""
        return self.session.token_ids

    def trajectory(self) -> Trajectory:
        """The whole conversation as tensors for a trainer."""
        return self.session.trajectory()

    def fork(self) -> Session:
        """Another session that goes on from here: a group of samples of one turn, a branch."""
        return Session(self.session.fork(), self._call)

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns; the ids before them stay exact."""
        self.session.rewind(turns)


class Sessions:
    """Sessions of a server by the names that clients gave them, bounded in number and tokens.

    The one that was used longest ago makes room; after ``idle`` seconds one is forgotten. A name
    is its owner's secret: who knows it reads and continues the session. For one event loop.
    """

    def __init__(
        self,
        make: Callable[[], AsyncSession],
        *,
        limit: int = MAX_SESSIONS,
        max_tokens: int = MAX_TOKENS,
        idle: float = IDLE_SECONDS,
    ) -> None:
        self._make, self._limit, self._max_tokens, self._idle = make, limit, max_tokens, idle
        self._held: OrderedDict[str, tuple[AsyncSession, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, name: str) -> AsyncSession:
        """Raises ``InvalidRequest`` for one that is not there (any more)."""
        self._forget_idle()
        if name not in self._held:
            raise InvalidRequest(
                f"no session {name[:_LONGEST_ID]!r} is here: it was never begun, was finished, "
                f"or made room for others (idle for {self._idle:g} s, or too many)"
            )
        return self._touch(name)

    def messages(self, name: str) -> list[dict[str, Any]]:
        """Of the session of this name, and none where it is not there."""
        return self._held[name][0].messages if name in self._held else []

    def end(self, name: str) -> bool:
        """Forget it; whether it was there."""
        return self._held.pop(name, None) is not None

    async def stream_chat(
        self,
        name: str,
        conversation: Messages,
        params: OneParams,
        *,
        request_id: str,
        stream: bool,
        restart: bool = False,
        options: ChatOptions | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """The next turn, from the whole conversation as chat clients send it.

        ``options`` are the template's from this turn on.
        ``restart``: begin anew from this text, answers included; else their ids have to be here.
        """
        session = self._of(name, conversation, restart)
        try:
            session.options = options or session.options
            known = session.rewind_to(conversation)
            outputs = session.stream_chat(
                conversation[known:], params, request_id=request_id, stream=stream
            )
            async with aclosing(outputs):
                async for output in outputs:
                    yield 0, output
        finally:
            self._settle(name, session)

    def _of(self, name: str, conversation: Messages, restart: bool) -> AsyncSession:
        if not 0 < len(name) <= _LONGEST_ID:
            raise InvalidRequest(f"X-Session-ID must have 1 to {_LONGEST_ID} characters")
        self._forget_idle()
        if name in self._held and not restart:
            return self._touch(name)
        answered = any(message.get("role") == "assistant" for message in conversation)
        if answered and not restart:
            raise InvalidRequest(
                f"the session {name!r} is not here (never begun, finished, or forgotten after "
                f"{self._idle:g} s), and the conversation has answers whose ids are not known: "
                "send X-Session-Restart: true to tokenise their text"
            )
        session = self._make()
        self._held.pop(name, None)
        self._held[name] = (session, time.monotonic())
        self._make_room(name)
        if len(self._held) > self._limit:
            del self._held[name]
            raise EngineOverloaded(f"{self._limit} sessions have a turn under way; retry later")
        return session

    def _settle(self, name: str, session: AsyncSession) -> None:
        """After a turn: one that has none is not kept, and what has grown makes room."""
        held = self._held.get(name)
        if held is not None and held[0] is session:
            if session.num_tokens == 0 and not session.running:
                del self._held[name]
            self._make_room(name)

    def _touch(self, name: str) -> AsyncSession:
        session, _ = self._held.pop(name)
        self._held[name] = (session, time.monotonic())
        return session

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - self._idle
        for name, (session, used) in list(self._held.items()):
            if used > oldest:
                return
            if not session.running:
                del self._held[name]

    def _make_room(self, name: str) -> None:
        """Forget what was used longest ago and has no turn under way; never ``name``."""
        tokens = sum(session.num_tokens for session, _ in self._held.values())
        for other, (session, _) in list(self._held.items()):
            if tokens <= self._max_tokens and len(self._held) <= self._limit:
                return
            if other != name and not session.running:
                tokens -= session.num_tokens
                del self._held[other]


async def _last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    return last


def _as_messages(messages: Any, *, first: bool) -> list[Mapping[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest('messages must be a list of {"role", "content"} with one at least')
    if not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequest('messages must be a list of {"role", "content"}')
    if not first and any(message.get("role") == "assistant" for message in messages):
        raise InvalidRequest(
            "only the engine answers in a session: its messages of a later turn have no role "
            '"assistant"; text of your own in its place is appended by generate'
        )
    return list(messages)


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether a client's copy of a message is the one that is here; null is as good as absent."""
    return all(ours.get(key) == theirs.get(key) for key in ours.keys() | theirs.keys())
