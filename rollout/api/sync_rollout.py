"""``Rollout``: the verbs of ``AsyncRollout``, blocking, over one thread with its own event loop."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import update_wrapper
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

from rollout.api.arguments import OneParams
from rollout.api.async_rollout import AsyncRollout
from rollout.api.colocated.ranks import MEET_TIMEOUT, ColocatedRollout
from rollout.api.loop_thread import LoopThread
from rollout.api.sessions.session import Session
from rollout.api.weight_verbs import WeightVerbs
from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import NOT_COPIED, SHUT_DOWN, EngineClosed, InvalidRequest
from rollout.generation import AnyPrompt, RequestOutput
from rollout.rpc.tls import ClientTls
from rollout.wire.spellings import VERBS, explains_arguments

P = ParamSpec("P")
R = TypeVar("R")

# Of forked processes, which free none: sockets and gRPC's channels are shared with the parent's.
_inherited: list[AsyncRollout] = []


def _blocking(
    method: Callable[Concatenate[AsyncRollout, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Rollout, P], R]:
    def verb(self: Rollout, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.run(method(self._async, *args, **kwargs))

    update_wrapper(verb, method)
    return verb


def _here(
    method: Callable[Concatenate[WeightVerbs, P], R],
) -> Callable[Concatenate[Rollout, P], R]:
    """A weight verb in the calling thread, where the trainer's collectives belong."""

    def verb(self: Rollout, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._async.weights, *args, **kwargs)

    update_wrapper(verb, method)
    return verb


@explains_arguments(VERBS, InvalidRequest)
class Rollout:
    """A rollout service, embedded (``Rollout(model, **EngineConfig fields)``) or connected.

    Thread-safe. Ctrl-C in a verb aborts its requests. ``shutdown``, or leaving ``with``, ends the
    engine and everything it started.
    """

    def __init__(self, model: str | os.PathLike[str], **engine_config: Any) -> None:
        self._begin(lambda: AsyncRollout(model, **engine_config))

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
        """Connect to the gRPC server at "host:port"; every rank of a trainer may do so.

        ``timeout``: seconds that bound every call but generation, and in that the wait for a
        ``min_version``, which ends with ``VersionConflict``; once its version is live a request
        takes as long as it takes.
        ``min_version``: the oldest weights that its requests take, see the property.
        ``tls``: the certificates to require and to present (``rollout.rpc.tls.ClientTls``). Raises
        ``EngineClosed`` if nothing answers there.
        """
        return cls.over(
            lambda: AsyncRollout.connect(address, token, timeout, tls=tls, min_version=min_version)
        )

    @classmethod
    def from_ranks(
        cls,
        model: str | os.PathLike[str],
        group: Any = None,
        *,
        meet_timeout: float = MEET_TIMEOUT,
        **engine_config: Any,
    ) -> ColocatedRollout:
        """An engine whose ranks are this job's own processes; collective over ``group``.

        ``group``: of ``torch.distributed``, or a device mesh of one dimension (None: all ranks of
        the job). ``meet_timeout``: seconds that one rank waits for the others to make the same
        call. ``engine_config``: as for ``Rollout``, the same on every rank.
        """
        return ColocatedRollout(
            model, group, over=cls.over, meet_timeout=meet_timeout, **engine_config
        )

    @classmethod
    def over(cls, make: Callable[[], AsyncRollout]) -> Self:
        """The blocking verbs over what ``make`` returns, once that has started."""
        self = cls.__new__(cls)
        self._begin(make)
        return self

    def _begin(self, make: Callable[[], AsyncRollout]) -> None:
        self._async = make()
        self._loop = LoopThread()
        self._end = weakref.finalize(self, _collected, self._async, self._loop)
        try:
            self._loop.run(self._async.start())
        except BaseException:
            Rollout.shutdown(self)  # a subclass's own is of what has been made
            raise
        # Before what its threads have registered: an engine that nobody closed ends in order.
        atexit.register(self._end)

    generate = _blocking(AsyncRollout.generate)
    chat = _blocking(AsyncRollout.chat)
    embed = _blocking(AsyncRollout.embed)
    classify = _blocking(AsyncRollout.classify)
    score = _blocking(AsyncRollout.score)
    tokenize = _blocking(AsyncRollout.tokenize)
    render = _blocking(AsyncRollout.render)
    abort = _blocking(AsyncRollout.abort)
    server_info = _blocking(AsyncRollout.server_info)
    pause_generation = _blocking(AsyncRollout.pause_generation)
    resume_generation = _blocking(AsyncRollout.resume_generation)
    sleep = _blocking(AsyncRollout.sleep)
    wake_up = _blocking(AsyncRollout.wake_up)
    reset_prefix_cache = _blocking(AsyncRollout.reset_prefix_cache)
    metrics = _blocking(AsyncRollout.metrics)
    serve = _blocking(AsyncRollout.serve)

    update_weights = _here(WeightVerbs.update_weights)
    weight_info = _here(WeightVerbs.weight_info)
    rollback = _here(WeightVerbs.rollback)
    receipts = _here(WeightVerbs.receipts)
    check_weights = _here(WeightVerbs.check_weights)
    preflight = _here(WeightVerbs.preflight)
    load_lora_adapter = _here(WeightVerbs.load_lora_adapter)
    unload_lora_adapter = _here(WeightVerbs.unload_lora_adapter)
    save_sharded_state = _here(WeightVerbs.save_sharded_state)
    collective_rpc = _here(WeightVerbs.collective_rpc)

    def stream(
        self, prompt: AnyPrompt | Mapping[str, Any], params: OneParams | None = None
    ) -> Iterator[RequestOutput]:
        """Cumulative outputs of one prompt as they grow; leaving the loop aborts the request."""
        outputs = self._async.stream(prompt, params)
        try:
            while True:
                try:
                    yield self._loop.run(anext(outputs))
                except StopAsyncIteration:
                    return
        finally:
            with contextlib.suppress(EngineClosed):  # shut down meanwhile: nothing left to abort
                self._loop.run(outputs.aclose())

    def session(self, **variables: Any) -> Session:
        """A conversation of several turns that continues exact token ids.

        ``variables`` are passed to the chat template: ``tools``, or any of its own.
        """
        return Session(self._async.session(**variables), self._loop.run)

    @property
    def min_version(self) -> int:
        """The oldest version that requests take which ask for none (``SamplingParams.min_version``;
        0, the default: any). They wait for it, at most the engine's timeout, and this client's.

        It counts in the epoch of the engine, or fleet, that is there when it is first used: in
        another one requests end with ``EngineRestarted``, until it is set anew, or this client has
        committed there. Requests of a client that has updated weights ask for its last commit
        without it.
        """
        return self._async.min_version

    @min_version.setter
    def min_version(self, version: int) -> None:
        self._async.min_version = version

    @property
    def weight_version(self) -> int:
        """The live version."""
        return self._loop.run(self._async.weight_version)

    @property
    def address(self) -> str:
        """The "host:port" for others to ``connect`` to; an embedded engine starts serving."""
        return self._loop.run(self._async.address)

    def shutdown(self) -> None:
        """End the server, the engine and its processes; a connected one only disconnects. In a
        forked process it ends nothing: all of it is its parent's.
        """
        if self._end.detach() is not None:
            _shut_down(self._async, self._loop)
        atexit.unregister(self._end)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_COPIED)

    def __repr__(self) -> str:
        made = vars(self).get("_async")  # not there where making it has failed
        return super().__repr__() if made is None else made._described(type(self).__name__)

    def __enter__(self) -> Self:
        if self._async.weights.is_closed:
            raise EngineClosed(SHUT_DOWN)
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _collected(rollout: AsyncRollout, loop: LoopThread) -> None:
    """Nobody has it any more, or the interpreter ends. Garbage of a cycle is found in any thread,
    one that its end would wait for among them: all of those are called so.
    """
    if not threading.current_thread().name.startswith("rollout-"):
        _shut_down(rollout, loop)
    else:  # the interpreter waits for that, too
        end = threading.Thread(target=_shut_down, args=(rollout, loop), name="rollout-end")
        end.daemon = False
        end.start()


def _shut_down(rollout: AsyncRollout, loop: LoopThread) -> None:
    """Also runs at interpreter exit, when no thread can be started any more."""
    if rollout.weights.is_forked:
        _inherited.append(rollout)
        return
    try:
        loop.run(rollout.disconnect())
    finally:
        rollout.backend.close()
        rollout.weights.close()
        loop.close()
