"""Multi-turn conversations that continue exact token ids: nothing is tokenised twice.

The prompt of a turn is all ids of the turns before it, as the engine saw and sampled them, and then
only the new messages. The text that the chat template puts around these is found by rendering the
history with a marker in place of the last answer: what follows the marker is new. It is tokenised
by itself and appended, without an end token that was already sampled.
"""

from __future__ import annotations

import asyncio
import operator
import sys
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.api.arguments import as_conversation, as_one_prompt
from rollout.api.backend import Backend
from rollout.api.read_floor import ReadFloor
from rollout.api.sessions.trajectory import SessionTokens, Trajectory
from rollout.api.visual_inputs import has_visuals, portable, read_visuals, take_visuals
from rollout.errors import EngineRestarted, InvalidRequest
from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    PromptInput,
    RequestOutput,
    SamplingParams,
    VisualPrompt,
)
from rollout.rpc.convert import Messages
from rollout.wire.spellings import VERBS, explains_arguments

R = TypeVar("R")
OneParams = SamplingParams | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn's beginning: what ``rewind`` goes back to. ``ended``: by a token it sampled.

    ``finish_reason``: of its sample.
    """

    messages: int
    tokens: int
    ended: bool
    templated: bool
    finish_reason: str


@explains_arguments(VERBS, InvalidRequest)
class AsyncSession:
    """A conversation; made by ``AsyncRollout.session``. A turn that fails leaves it as it was.

    ``chat`` takes messages, which go through the chat template; ``generate`` takes text or token
    ids, appended as they are. One turn runs at a time, with one sample (``n=1``): ``fork`` before
    a turn that is to have several. No turn runs on older weights than the turns before it, or than
    ``read_floor`` says, unless it asks for a ``min_version`` itself.
    """

    def __init__(
        self,
        backend: Backend,
        start: Callable[[], Awaitable[None]],
        options: ChatOptions,
        read_floor: Callable[[], ReadFloor],
    ) -> None:
        self._backend, self._start, self._client_floor = backend, start, read_floor
        self._version = 0  # the highest that a turn has seen, or asked for
        self.options = options  # of its later turns, too
        self._messages: list[dict[str, Any]] = []
        self._templated = True  # until raw tokens come, of which no template knows
        self._prompt: list[int] = []
        self._tokens = SessionTokens()
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
        if has_visuals(new):
            new = await asyncio.to_thread(portable, new)
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
        given = as_one_prompt(prompt)
        with self._one_turn():
            if isinstance(given, str):
                await self._start()
                first = not self._turns  # the tokenizer's own rule decides about a BOS there
                ids = await self._backend.tokenize(given, first) if given else []
            else:
                ids = given
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

    @property
    def held_bytes(self) -> int:
        """About what its messages, answers and options take, beside its tokens."""
        options = (self.options.tools, self.options.chat_template_kwargs)
        return size_in_memory((self._messages, self._texts, *options))

    def trajectory(self) -> Trajectory:
        """The whole conversation as tensors, copied."""
        reasons = tuple(turn.finish_reason for turn in self._turns)
        return self._tokens.trajectory(self._prompt, self._epoch, reasons)

    def fork(self) -> AsyncSession:
        """Another session that goes on from here: a group of samples of one turn, a branch."""
        other = AsyncSession(self._backend, self._start, self.options, self._client_floor)
        other._version = self._version
        other._messages, other._templated = self.messages, self._templated
        other._prompt, other._tokens = list(self._prompt), self._tokens.copy()
        other._turns, other._epoch = list(self._turns), self._epoch
        other._texts = list(self._texts)
        return other

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns, their messages and answers; the ids before them stay exact."""
        try:
            last = operator.index(turns)
        except TypeError:
            raise InvalidRequest(f"turns must be an integer, got {turns!r:.80}") from None
        if not 1 <= last <= len(self._turns):
            raise InvalidRequest(f"cannot forget {last} turns of {len(self._turns)}")
        with self._one_turn():
            turn = self._turns[-last]
            del self._turns[-last:], self._texts[-last:], self._messages[turn.messages :]
            self._tokens.cut(turn.tokens)
            self._templated = turn.templated
            if not self._turns:
                self._prompt, self._epoch, self._version = [], None, 0

    def rewind_to(self, messages: Messages) -> int:
        """How many of ``messages`` are this session's; turns that go beyond these are forgotten.

        For a client that sends the whole conversation each time: it may go on, ask for an answer
        again, or branch off earlier. What it says that the engine answered must be what the engine
        did answer. Else the history was edited, and nobody has sampled ids of its text:
        ``InvalidRequest``.
        """
        as_conversation(messages)
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
        await self._start()
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
        await self._start()
        one = SamplingParams.of(params)
        if one.n != 1:
            raise InvalidRequest(f"a turn of a session has one sample, not n={one.n}: fork it")
        floor = ReadFloor(self._version, self._epoch).joined(self._client_floor())
        [one] = floor.under([one])
        ids = [*self.token_ids, *added]
        prompt: AnyPrompt = ids
        _, parts = take_visuals([*self._messages, *(messages or ())])
        if parts:
            prompt = VisualPrompt(ids, await asyncio.to_thread(read_visuals, parts))
        name = request_id or uuid.uuid4().hex
        outputs = self._backend.generate([prompt], [one], [name], stream=stream)
        async with aclosing(outputs):
            async for _, output in outputs:
                if output.finished:
                    self._record(output, messages, one.min_version or 0)
                yield output

    def _record(
        self,
        output: RequestOutput,
        messages: Sequence[Mapping[str, Any]] | None,
        asked: int,
    ) -> None:
        if self._epoch not in (None, output.epoch):
            raise EngineRestarted(
                f"the engine has restarted (epoch {output.epoch}): the versions of this session "
                "count in another life of it; begin a new session"
            )
        [completion] = output.outputs
        ended = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        reason = completion.finish_reason or ""
        turn = _Turn(len(self._messages), len(self._tokens.ids), ended, self._templated, reason)
        if self._turns:
            # With a placeholder for each part of what is seen, and times: as the engine saw it.
            self._tokens.append(output.prompt_token_ids[self.num_tokens :])
        else:
            self._prompt = list(output.prompt_token_ids)
        self._tokens.sampled(completion)
        self._turns.append(turn)
        self._texts.append(completion.text)
        self._epoch = output.epoch
        seen = (span.version for span in completion.weight_versions)
        self._version = max(self._version, asked, *seen)
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


@explains_arguments(VERBS, InvalidRequest)
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


async def _last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    return last


def _as_messages(messages: Any, *, first: bool) -> list[Mapping[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest('messages must be a list of {"role", "content"} with one at least')
    as_conversation(messages)
    if not first and any(message.get("role") == "assistant" for message in messages):
        raise InvalidRequest(
            "only the engine answers in a session: its messages of a later turn have no role "
            '"assistant"; text of your own in its place is appended by generate'
        )
    return list(messages)


def size_in_memory(value: Any) -> int:
    """Bytes of ``value``, of JSON's types, with all that lies in it."""
    total, left = 0, [value]
    while left:
        each = left.pop()
        total += sys.getsizeof(each)
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each
    return total


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether a client's copy of a message is the one that is here; null is as good as absent."""
    return all(ours.get(key) == theirs.get(key) for key in ours.keys() | theirs.keys())
