"""``AsyncRollout``: an engine in this process or elsewhere, behind the same awaitable verbs."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

from rollout.api.arguments import as_flag, as_texts
from rollout.api.backend import Backend
from rollout.api.call_names import CallNames
from rollout.api.generation_verbs import GenerationVerbs
from rollout.api.read_floor import ReadFloor
from rollout.api.sessions.session_store import Sessions
from rollout.api.verb_threads import VerbThreads
from rollout.api.weight_verbs import WeightVerbs
from rollout.config import DEFAULT_TIMEOUT, EngineConfig, check_timeout, timeout_problem
from rollout.errors import FORKED, NOT_COPIED, SHUT_DOWN, ConfigError, EngineClosed, InvalidRequest
from rollout.generation.metrics import EngineStats
from rollout.rpc.address import split_address
from rollout.rpc.client import RolloutClient
from rollout.rpc.tls import ClientTls
from rollout.wire.spellings import VERBS, explains_arguments
from rollout.wire.version import ServerInfo

P = ParamSpec("P")
R = TypeVar("R")

# Looked up when first served: api imports no server.
GRPC_SERVER = "rollout.server.grpc.server:serve"


def _in_thread(
    method: Callable[Concatenate[WeightVerbs, P], R], *, at_once: bool = False
) -> Callable[Concatenate[AsyncRollout, P], Coroutine[Any, Any, R]]:
    """A weight verb, awaitable: runs in a thread, and to its end even when cancelled. For one that
    is ``at_once``, and never waits for an update, the loop's own threads will do.
    """

    async def verb(self: AsyncRollout, /, *args: P.args, **kwargs: P.kwargs) -> R:
        await self.start()
        call = partial(method, self.weights, *args, **kwargs)
        return await (asyncio.to_thread(call) if at_once else self.threads.run(call))

    update_wrapper(verb, method)
    return verb


@explains_arguments(VERBS, InvalidRequest)
class AsyncRollout(GenerationVerbs):
    """A rollout service, embedded (``AsyncRollout(model, **EngineConfig fields)``) or connected.

    The engine starts with ``start``, ``async with`` or the first verb. Use it from one event loop.
    """

    def __init__(self, model: str | os.PathLike[str], **engine_config: Any) -> None:
        from rollout.api.embedded import EmbeddedBackend

        config = EngineConfig.from_dict({"model": model, **engine_config})
        backend = EmbeddedBackend(config)
        self._set_up(backend, None, lambda: f"of {config.model}, version {backend.core.version}")

    @classmethod
    def connect(
        cls,
        address: str,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        tls: ClientTls | None = None,
        min_version: int = 0,
    ) -> Self:
        """Connect to the gRPC server at "host:port".

        ``timeout``: seconds that bound every call but generation, and in that the wait for a
        ``min_version``, which ends with ``VersionConflict``; once its version is live a request
        takes as long as it takes. ``min_version``: see the property.
        """
        if isinstance(token, int) and isinstance(address, str) and ":" not in address:
            raise ConfigError(f"host and port are one text: connect('{address:.300}:{token}')")
        split_address(address)
        if not isinstance(tls, ClientTls | None):
            raise ConfigError(f"tls must be a ClientTls(ca=...), or None, got {tls!r:.80}")
        if problem := timeout_problem(timeout):
            raise ConfigError(f"timeout {problem}")
        self = cls.__new__(cls)
        self._set_up(RolloutClient(address, token, timeout, tls=tls), address, lambda: "")
        self.min_version = min_version
        return self

    @classmethod
    def over(cls, backend: Backend) -> Self:
        """The same verbs over an existing backend; ``shutdown`` closes it."""
        self = cls.__new__(cls)
        self._set_up(backend, None, lambda: f"over {type(backend).__name__}")
        return self

    def _set_up(self, backend: Backend, address: str | None, shown: Callable[[], str]) -> None:
        self.backend, self.names = backend, CallNames()
        self.weights = WeightVerbs(backend)
        self.threads = VerbThreads()
        self._floor = ReadFloor()
        self._address, self._shown = address, shown
        self._served_as: tuple[str, int, dict[str, Any]] | None = None
        self._server: Any = None
        self._serving = asyncio.Lock()
        self.sessions = Sessions(self.session)  # those that HTTP clients name

    async def start(self) -> None:
        self._check_open()
        await super().start()

    def _check_open(self) -> None:
        """A client would connect again, a server outlive its engine; nobody would end either."""
        if self.weights.is_forked:
            raise EngineClosed(FORKED)
        if self.weights.is_closed:
            raise EngineClosed(SHUT_DOWN)

    async def state(self) -> str:
        """``EngineStats.state``, or "loading" until ``start`` is done, which this never waits for.

        Requests are served while it is "running".
        """
        return "closed" if self.weights.is_closed else await self.backend.state()

    @property
    def min_version(self) -> int:
        """The oldest version that requests take which ask for none (``SamplingParams.min_version``;
        0, the default: any). They wait for it, at most the engine's timeout, and this client's.

        It counts in the epoch of the engine, or fleet, that is there when it is first used: in
        another one requests end with ``EngineRestarted``, until it is set anew, or this client has
        committed there. Requests of a client that has updated weights ask for its last commit
        without it.
        """
        return self._floor.version

    @min_version.setter
    def min_version(self, version: int) -> None:
        self._floor = ReadFloor.of(version)

    def read_floor(self) -> ReadFloor:
        """What requests may not be older than, by ``min_version`` and by this client's commits."""
        epoch, committed = self.backend.seen
        if self._floor.epoch is None:
            self._floor = replace(self._floor, epoch=epoch)
        return ReadFloor(committed, epoch).joined(self._floor)

    # ---- control ----

    async def server_info(self) -> ServerInfo:
        """Model name, epoch, version, state, longest sequence and ranks of the engine."""
        await self.start()
        return await self.backend.server_info()

    async def pause_generation(self, mode: str = "keep", timeout: float = DEFAULT_TIMEOUT) -> None:
        """Stop stepping; new requests wait in the queue until ``resume_generation``, however long.
        The first of them is a warning in the engine's log; ``metrics().state`` is "paused".

        ``mode`` says what becomes of running requests: "keep" them as they are, "recompute" their
        KV on resuming, "wait" for them to finish, or "abort" them (``finish_reason`` "abort").
        ``timeout``: seconds, at most a day. If "wait" takes longer, generation goes on as before
        and ``DeadlineExceeded`` is raised.
        """
        await self.start()
        if not isinstance(mode, str) or not mode:
            raise InvalidRequest(f"pause mode must be a text, such as 'keep', got {mode!r:.80}")
        await self.backend.pause(mode, check_timeout(timeout))

    async def resume_generation(self) -> None:
        """Step again after ``pause_generation``; does nothing if generation is not paused."""
        await self.start()
        await self.backend.resume()

    async def sleep(
        self, level: int = 1, mode: str = "keep", timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Free device memory. Level 1 frees the KV cache and moves the weights to host memory;
        level 2 drops the weights, so that a full update is needed.

        ``mode`` says what becomes of running requests: "keep" freezes them until ``wake_up``,
        "wait" lets them finish first (``DeadlineExceeded``, and the engine stays awake, where they
        do not in ``timeout`` seconds), "abort" ends them (``finish_reason`` "abort").
        """
        await self.start()
        if not isinstance(mode, str) or not mode:
            raise InvalidRequest(f"sleep mode must be a text, such as 'keep', got {mode!r:.80}")
        if type(level) is not int or level not in (1, 2):
            raise InvalidRequest(f"sleep level must be 1 or 2, got {level!r:.80}")
        await self.backend.sleep(level, mode, check_timeout(timeout))

    async def wake_up(
        self, tags: str | Sequence[str] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Bring back what ``sleep`` freed: ``tags`` "weights", "kv_cache", or None for both."""
        await self.start()
        await self.backend.wake_up(as_texts(tags, "tags"), check_timeout(timeout))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Empty the prefix cache; not needed after an update. ``reset_running_requests``: what
        runs computes its KV again, too; whether generation is paused stays as it is.
        """
        running = as_flag(reset_running_requests, "reset_running_requests")
        await self.start()
        await self.backend.reset_prefix_cache(running)

    async def metrics(self) -> EngineStats:
        """A snapshot of the engine's metrics."""
        await self.start()
        return await self.backend.stats()

    # ---- weights ----

    update_weights = _in_thread(WeightVerbs.update_weights)
    weight_info = _in_thread(WeightVerbs.weight_info, at_once=True)
    rollback = _in_thread(WeightVerbs.rollback)
    receipts = _in_thread(WeightVerbs.receipts, at_once=True)
    check_weights = _in_thread(WeightVerbs.check_weights)
    preflight = _in_thread(WeightVerbs.preflight)
    load_lora_adapter = _in_thread(WeightVerbs.load_lora_adapter)
    unload_lora_adapter = _in_thread(WeightVerbs.unload_lora_adapter)
    save_sharded_state = _in_thread(WeightVerbs.save_sharded_state)
    collective_rpc = _in_thread(WeightVerbs.collective_rpc)

    @property
    def weight_version(self) -> Coroutine[Any, Any, int]:
        """The live version: ``await r.weight_version``."""
        return self._version()

    async def _version(self) -> int:
        return (await self.server_info()).version

    # ---- serving and the end ----

    @property
    def address(self) -> Coroutine[Any, Any, str]:
        """The "host:port" for others to connect to: ``await r.address``; serves on loopback."""
        return self.serve()

    async def serve(self, /, host: str = "127.0.0.1", port: int = 0, **options: Any) -> str:
        """Serve this engine over gRPC, once; port 0 picks a free one. Returns "host:port". The
        server lives in the event loop of this call, and as long.

        ``options`` are those of ``server.grpc.server.serve``. Once it is served, the same call
        gives its address again. Raises ``ConfigError`` naming a busy port, or where it is served
        otherwise already.
        """
        if not (isinstance(host, str) and host and type(port) is int and 0 <= port < 1 << 16):
            raise ConfigError(
                f"serve takes a host and a port of 0..65535, got {host!r:.80} and {port!r:.80}"
            )
        self._check_open()
        async with self._serving:
            asked = host, port, options
            if self._address is not None and (options or port) and asked != self._served_as:
                raise ConfigError(
                    f"it is served at {self._address} already; an engine has one gRPC server"
                )
            if self._address is None:
                await self.start()
                module, _, name = GRPC_SERVER.partition(":")
                serve = getattr(importlib.import_module(module), name)
                known = [
                    one.name
                    for one in signature(serve).parameters.values()
                    if one.kind is one.KEYWORD_ONLY
                ]
                for given in options.keys() - set(known):
                    raise ConfigError(f"serve takes no {given!r}; {VERBS.hint(given, known)}")
                self._server = await serve(self, host, port, **options)
                self._address, self._served_as = str(self._server.address), asked
            return self._address

    async def shutdown(self) -> None:
        """End the server, the engine and its processes; a connected one only disconnects. In a
        forked process it ends nothing: all of it is its parent's.
        """
        if self.weights.is_forked:
            return
        await self.disconnect()
        await asyncio.to_thread(self.backend.close)
        self.weights.close()

    async def disconnect(self) -> None:
        """The part of ``shutdown`` that belongs to the loop: end the server and connections."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        await self.backend.disconnect()
        self.threads.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_COPIED)

    def __repr__(self) -> str:
        return self._described(type(self).__name__)

    def _described(self, name: str) -> str:
        """For ``repr``, of a class of that ``name``; asks no service."""
        if "_shown" not in vars(self):  # making it has failed
            return object.__repr__(self)
        at = "" if self._address is None else f"at {self._address}"
        parts = [self._shown(), at, "shut down" if self.weights.is_closed else ""]
        return f"<{name} {', '.join(filter(None, parts))}>"

    async def __aenter__(self) -> Self:
        self._check_open()
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()
