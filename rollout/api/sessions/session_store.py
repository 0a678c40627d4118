"""The sessions that a server keeps for clients that name theirs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from rollout.api.sessions.session import AsyncSession, OneParams
from rollout.errors import EngineOverloaded, InvalidRequest
from rollout.generation import ChatOptions, RequestOutput
from rollout.rpc.convert import Messages

MAX_SESSIONS = 4096
MAX_TOKENS = 8 << 20  # of all sessions; some 40 bytes each
MAX_BYTES = 256 << 20  # of all sessions' messages and tools, as they lie in memory
IDLE_SECONDS = 3600.0
_LONGEST_ID = 256


class Sessions:
    """Sessions of a server by the names that clients gave them: so many, so many tokens and bytes.

    The one that was used longest ago makes room; after ``idle`` seconds one is forgotten. A name
    is its owner's secret: who knows it reads and continues the session. For one event loop.

    A turn runs on a copy, which is held under the name once the turn is recorded: one that fails
    leaves the session as it was, with the turns that it would have rewound.
    """

    def __init__(
        self,
        make: Callable[[], AsyncSession],
        *,
        limit: int = MAX_SESSIONS,
        max_tokens: int = MAX_TOKENS,
        max_bytes: int = MAX_BYTES,
        idle: float = IDLE_SECONDS,
    ) -> None:
        self._make, self._limit, self._idle = make, limit, idle
        self._max_tokens, self._max_bytes = max_tokens, max_bytes
        self._bytes: dict[str, int] = {}  # of each that is held, as its last turn left it
        self._held: OrderedDict[str, tuple[AsyncSession, float]] = OrderedDict()
        self._turns: dict[str, AsyncSession] = {}  # the copies that turns run on, by name

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
        """Forget it; whether it was there. A turn of it that is under way is not kept."""
        self._turns.pop(name, None)
        self._bytes.pop(name, None)
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
        session = self._begun(name, conversation, restart)
        try:
            session.options = options or session.options
            known = session.rewind_to(conversation)
            outputs = session.stream_chat(
                conversation[known:], params, request_id=request_id, stream=stream
            )
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finished:
                        self._keep(name, session)
                    yield 0, output
        finally:
            self._over(name, session)

    def _begun(self, name: str, conversation: Messages, restart: bool) -> AsyncSession:
        """What a new turn runs on. One that begins anew takes the place of one under way."""
        held = self._of(name, conversation, restart)
        if name in self._turns and not restart:
            raise InvalidRequest("a turn of this session is under way: a session has one at a time")
        self._turns[name] = self._make() if restart else held.fork()
        return self._turns[name]

    def _of(self, name: str, conversation: Messages, restart: bool) -> AsyncSession:
        if not 0 < len(name) <= _LONGEST_ID:
            raise InvalidRequest(f"X-Session-ID must have 1 to {_LONGEST_ID} characters")
        self._forget_idle()
        if name in self._held:
            return self._touch(name)
        answered = any(message.get("role") == "assistant" for message in conversation)
        if answered and not restart:
            raise InvalidRequest(
                f"the session {name!r} is not here (never begun, finished, or forgotten after "
                f"{self._idle:g} s), and the conversation has answers whose ids are not known: "
                "send X-Session-Restart: true to tokenise their text"
            )
        session = self._make()
        self._held[name] = (session, time.monotonic())
        self._make_room(name)
        if len(self._held) > self._limit:
            self.end(name)
            raise EngineOverloaded(f"{self._limit} sessions have a turn under way; retry later")
        return session

    def _keep(self, name: str, session: AsyncSession) -> None:
        """A turn was recorded: the session is now what it ran on, and others make room for it."""
        if self._turns.get(name) is session:
            self._held[name] = (session, time.monotonic())
            self._held.move_to_end(name)
            self._bytes[name] = session.held_bytes
            self._make_room(name)

    def _over(self, name: str, session: AsyncSession) -> None:
        """After a turn, however it ended: a session that has none is not kept."""
        if self._turns.get(name) is session:
            del self._turns[name]
            if self._held[name][0].num_tokens == 0:
                self.end(name)

    def _touch(self, name: str) -> AsyncSession:
        session, _ = self._held.pop(name)
        self._held[name] = (session, time.monotonic())
        return session

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - self._idle
        for name, (_, used) in list(self._held.items()):
            if used > oldest:
                return
            if name not in self._turns:
                self.end(name)

    def _make_room(self, name: str) -> None:
        """Forget what was used longest ago and has no turn under way; never ``name``."""
        tokens = sum(session.num_tokens for session, _ in self._held.values())
        nbytes = sum(self._bytes.values())
        for other, (session, _) in list(self._held.items()):
            fit = tokens <= self._max_tokens and nbytes <= self._max_bytes
            if fit and len(self._held) <= self._limit:
                return
            if other != name and other not in self._turns:
                tokens -= session.num_tokens
                nbytes -= self._bytes.get(other, 0)
                self.end(other)
