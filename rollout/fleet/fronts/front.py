"""What every front of a fleet does by itself: its clients' calls, over members that serve."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from rollout.config import DEFAULT_TIMEOUT
from rollout.distributed import LOOPBACK
from rollout.engine.updates.verbs.session import VerbSession
from rollout.errors import ConfigError, EngineClosed, EngineError, TransferFailed, VersionConflict
from rollout.fleet.calls.call import FleetCall, Outputs
from rollout.fleet.calls.calls import Calls
from rollout.fleet.calls.hold import Holding
from rollout.fleet.calls.reports import Reports
from rollout.fleet.calls.taken import answer_of
from rollout.fleet.coordination.member import standing
from rollout.fleet.directory import Directory
from rollout.fleet.fronts.stats import summed
from rollout.fleet.launching.replicas import Replicas
from rollout.fleet.link import Link
from rollout.fleet.updates.committed import live_receipt
from rollout.generation import AnyPrompt, ChatOptions, Completion, SamplingParams
from rollout.generation.metrics import EngineCounters, EngineStats
from rollout.rpc.convert import Messages
from rollout.rpc.tls import ServerTls
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.link import LinkOver
from rollout.weight_sync.protocol.membership import (
    AskReport,
    AskRoutes,
    Grant,
    PrepareRollback,
    Report,
    Routes,
    SendTo,
    Standing,
)
from rollout.weight_sync.protocol.messages import Decision, UpdateRequest, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.protocol.unload import unload
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.versions.adapter_files import AdapterFiles, adapter_directory
from rollout.weight_sync.versions.directories import readable, warn_of_absent
from rollout.weight_sync.versions.read_once import ReadOnce
from rollout.weights.adapters import AdapterLoaded
from rollout.wire.version import ServerInfo, Speaks

T = TypeVar("T")


class Front(ABC):
    """A ``Backend`` in the place of an engine; each (epoch, version) that leaves it is the fleet's.

    Its clients' prompts run by ``Calls`` over the members of its ``Directory``; who is paused or
    asleep says its ``Holding``. How weights change is each kind of front's own: ``info``, ``open``,
    ``rollback``. What a front reads itself goes through these, too.
    """

    reads_in_place = False
    joins = False
    # Members have these, each its own.
    config = directory = tokenizer = prompts = None
    local_address = LOOPBACK

    def __init__(self, fleet: Directory, hold: Holding, weight_dirs: Sequence[str] = ()) -> None:
        """``weight_dirs``: directories under which the front may read updates itself."""
        self.fleet, self.hold = fleet, hold
        self.calls = Calls(fleet, hold)
        self.reports = Reports(fleet, self.calls.router, self._others_route)
        self.weight_dirs = tuple(weight_dirs)
        warn_of_absent(self.weight_dirs)
        self._reads = ReadOnce(lambda r: (r.epoch, r.version) == (fleet.epoch, fleet.version))
        self._files = AdapterFiles(lambda: self.adapters)
        self.max_adapters = self._max_lora_rank = 0  # of its members, as they were at the start
        self._starting = asyncio.Lock()
        self._started: ServerInfo | None = None
        self._said_by: tuple[str, int | None] = "", None  # whose word that is, and its life
        self._closed = False

    # ---- life ----

    @abstractmethod
    async def start(self) -> None: ...

    async def _meet_members(self) -> None:
        """What a member says of itself, for all; and what they report, from now on."""
        self.reports.start()
        info = await asyncio.to_thread(self.fleet.ask_any, lambda client: client.info())
        self.max_adapters, self._max_lora_rank = info.max_adapters, info.max_lora_rank

    def _others_route(self) -> bool:
        """Whether members may have calls of other fronts."""
        return True

    @property
    def is_loading(self) -> bool:
        return self._started is None and not self._closed

    @property
    def waits_for(self) -> str:
        return f"no member of the fleet serves yet: {self.fleet.whys()}"

    @property
    def seen(self) -> tuple[int | None, int]:
        return self.fleet.epoch, 0

    @property
    def max_model_len(self) -> int:
        return 0 if self._started is None else self._started.max_model_len

    async def state(self) -> str:
        return self._state({standing.state for standing in self.fleet.standings().values()})

    def _state(self, states: set[str]) -> str:
        """``states``: what the members that serve say of themselves."""
        if self._closed:
            return "closed"
        if self._started is None:
            return "loading"
        if self.calls.closing:
            return "leaving"
        if states and self.hold.wanted.state:
            return self.hold.wanted.state
        return "running" if "running" in states else min(states, default="fenced")

    async def server_info(self) -> ServerInfo:
        """Without a question to a member, for as long as whoever was asked is of the fleet: clients
        ask whenever they connect, also while no member serves.
        """
        info = self._started
        if info is None:
            info = await self._any(self._asked)
        elif self.fleet.life(self._said_by[0]) != self._said_by[1] and self.fleet.serving():
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self.fleet.lease / 2):
                    self._started = info = await self._any(self._asked)
        return replace(
            info, epoch=self.fleet.epoch, version=self.fleet.version, state=await self.state(),
            software=Speaks.here().software,
        )  # fmt: skip

    async def disconnect(self) -> None:
        await self.reports.close()
        for link in self.fleet.serving():
            await link.client.disconnect()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fleet.close()

    # ---- generation ----

    def generate(
        self,
        prompts: Sequence[AnyPrompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        *,
        stream: bool,
    ) -> Outputs:
        params = self._floored(params)
        return self.calls.run(
            FleetCall(prompts=prompts, params=params, request_ids=request_ids, stream=stream)
        )

    def chat(
        self,
        conversations: Sequence[Messages],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        options: ChatOptions,
        *,
        stream: bool,
        delivered: Sequence[tuple[Completion, ...]] | None = None,
    ) -> Outputs:
        return self.calls.run(
            FleetCall(
                prompts=conversations, params=self._floored(params), request_ids=request_ids,
                stream=stream, options=options, given=delivered,
            )
        )  # fmt: skip

    async def tokenize(
        self,
        prompt: str | Messages,
        add_special_tokens: bool | None = None,
        options: ChatOptions | None = None,
    ) -> list[int]:
        return await self._any(
            lambda link: link.client.tokenize(prompt, add_special_tokens, options)
        )

    async def render(self, messages: Messages, options: ChatOptions) -> str:
        return await self._any(lambda link: link.client.render(messages, options))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        waiting, links = self.calls.abort(request_ids), self.fleet.with_calls()
        return waiting + sum(await self._all(lambda it: it.client.abort(request_ids), links))

    def end_calls(self, error: EngineError) -> None:
        self.calls.end(error)

    def leave(self) -> None:
        self.calls.closing = True

    is_member = False

    @property
    def has_left(self) -> bool:
        return not self.calls.running

    # ---- control ----

    async def pause(self, mode: str, timeout: float) -> None:
        await self.hold.pause(mode, timeout)

    async def resume(self) -> None:
        await self.hold.resume()

    async def sleep(self, level: int, mode: str, timeout: float) -> None:
        if level != 1:
            raise ConfigError(
                f"a fleet has no sleep(level={level}): its members keep their weights, which those "
                "that join are given; use sleep(level=1)"
            )
        await self.hold.sleep(level, mode, timeout)

    async def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        await self.hold.wake_up(tags, timeout)

    @property
    def asleep(self) -> frozenset[str]:
        """Tags that the fleet has given up."""
        return self.hold.wanted.asleep

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        await self.hold.reset_prefix_cache(reset_running_requests)

    async def stats(self) -> EngineStats:
        rows = await self._all(lambda link: link.client.stats(), self.fleet.serving())
        if not rows:
            self.fleet.one()  # says why none serves
            raise EngineClosed("no member of the fleet answers")
        return replace(
            summed(rows), state=self._state({row.state for row in rows}), epoch=self.fleet.epoch,
            weight_version=self.fleet.version, adapters=self.adapters,
            members=standing(self.fleet.members()), fleet=self.fleet.fleet_id, serving_lease=None,
            paused=self.hold.wanted.paused,
        )  # fmt: skip

    # ---- the fleet (async) ----

    @abstractmethod
    async def routes(self, ask: AskRoutes) -> Routes:
        """For a front that routes only: who serves, and how members are reached."""

    def report(self, ask: AskReport) -> Report:
        raise ConfigError("a front is no member of a fleet: its engines report")

    def note_routed(self, fleet: int, beginnings: Sequence[bytes]) -> None:  # noqa: B027
        """A front is no member: its own calls say it again."""

    # ---- weights (blocking) ----

    @property
    def served(self) -> Self:
        return self

    @property
    @abstractmethod
    def counters(self) -> EngineCounters: ...

    @property
    @abstractmethod
    def verbs(self) -> VerbSession | None: ...

    @property
    @abstractmethod
    def replicas(self) -> Replicas | None: ...

    @property
    def link(self) -> Self:
        return self

    @abstractmethod
    def info(self) -> WeightInfo: ...

    @abstractmethod
    def open(self) -> WeightChannel: ...

    @abstractmethod
    def rollback(self, timeout: float) -> UpdateReceipt: ...

    @abstractmethod
    def digests(self, timeout: float) -> dict[str, int]: ...

    @abstractmethod
    def receipts(self) -> tuple[UpdateReceipt, ...]: ...

    def join(self, request: UpdateRequest, secret: str, lane: int) -> WeightChannel:
        raise TransferFailed("a fleet's update has one channel")

    prepared = ""

    def decide(self, decision: Decision) -> UpdateReceipt | None:
        raise VersionConflict("a fleet decides by itself: no update of it waits for a decision")

    def serve(self, grant: Grant) -> Standing:
        raise ConfigError("a fleet is no member of another")

    def send_to(self, request: SendTo, shown: ServerTls | None = None) -> UpdateReceipt:
        raise ConfigError("a fleet is no member of another: ask one of its engines")

    def update_from(self, path: str, options: UpdateOptions) -> UpdateReceipt:
        """Read by the front, once for all members."""
        return self.update_once(readable(path, self.weight_dirs, self.info()), options)

    def update_once(self, source: Any, options: UpdateOptions) -> UpdateReceipt:
        """Nothing new where the last one had this ``update_id``, and is live still."""

        def read() -> UpdateReceipt:
            if options.update_id and (live := self._brought(options)) is not None:
                return live
            return publish(source, connect=lambda: _Reader(self), options=options)

        return self._reads.run(options.update_id or "", options.timeout, read)

    def prepare_rollback(self, request: PrepareRollback) -> None:
        raise ConfigError("a fleet is no member of another")

    @property
    def adapters(self) -> dict[str, int]:
        """The version of each that every member holds which serves."""
        return dict(self.fleet.adapters)

    @property
    def adapter_limits(self) -> tuple[int, int] | None:
        """It merges none."""
        loads = self.weight_dirs and self.max_adapters
        return (self._max_lora_rank, self.max_adapters) if loads else None

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Of adapters that requests may name: every member that serves holds them."""
        return self._files.names

    def load_lora_adapter(
        self, name: str, path: str, *, inplace: bool = False, anywhere: bool = True
    ) -> AdapterLoaded:
        """A PEFT directory's, read by the front, into a slot of every member, or of none.

        Unless ``anywhere``, it has to lie under one of ``weight_dirs``.
        """
        base = None if self._started is None else self._started.model
        where = Path(path).expanduser().absolute()
        if not anywhere:
            where = adapter_directory(name, path, self.weight_dirs)
        version = self._files.load(
            name, where, _Reader(self), inplace=inplace, timeout=DEFAULT_TIMEOUT, base_names=(base,)
        )
        return AdapterLoaded(name=name, version=version, merged=False)

    def unload_lora_adapter(self, name: str) -> bool:
        """By a commit of its own: from its version on, no member that serves has the name."""
        return self._files.unload(name, lambda: unload(self.adapters, self.open, name))

    def save_sharded_state(self, path: str, timeout: float) -> int:
        raise ConfigError("save_sharded_state writes where ranks run: call it on a member")

    def collective_rpc(
        self, method: str, args: list[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        raise ConfigError("collective_rpc runs what is a member's own: call it on each member")

    def committed_at(self, version: int) -> float | None:
        return None

    def committed(self, receipt: UpdateReceipt, *, partial: bool) -> None:  # noqa: B027
        """Nothing to remember: the record has it."""

    # ---- helpers ----

    def _brought(self, options: UpdateOptions) -> UpdateReceipt | None:
        """The receipt of what is live, where an update with these options has brought it: through
        another front, or before this one was started anew.
        """
        last = self.info().last_update_id
        if not options.is_named(last):
            return None
        ours = (receipt for receipt in self.receipts() if receipt.update_id == last)
        return next(ours, None) or live_receipt(self.fleet, last)

    def _floored(self, params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """A member that is about to commit an adapter is waited for by who asks for it. Epochs are
        the fleet's, of which a member knows nothing.
        """
        versions, found = self.adapters, []
        for one in params:
            one.check_epoch(self.fleet.epoch)
            floor = max(versions.get(one.adapter or "", 0), one.min_version or 0)
            if floor > (one.min_version or 0) or one.min_version_epoch is not None:
                one = replace(one, min_version=floor or None, min_version_epoch=None)
            found.append(one)
        return found

    async def _asked(self, link: Link) -> ServerInfo:
        life = self.fleet.life(link.name)
        info = await link.client.server_info()
        self._said_by = link.name, life
        return info

    async def _any(self, verb: Callable[[Link], Coroutine[Any, Any, T]]) -> T:
        """The answer of a member that serves; where one is silent until it does not, another's."""
        links = sorted(self.fleet.serving(), key=lambda link: link.calls)
        for link in links[:-1]:
            for answer in await self._answer(verb, link):
                return answer
        return await verb((links[-1:] or [self.fleet.one()])[0])

    async def _all(
        self, verb: Callable[[Link], Coroutine[Any, Any, T]], links: Sequence[Link]
    ) -> list[T]:
        """Of those that answer before they can serve no more."""

        found = await asyncio.gather(*(self._answer(verb, link) for link in links))
        return [answer for answers in found for answer in answers]

    async def _answer(
        self, verb: Callable[[Link], Coroutine[Any, Any, T]], link: Link
    ) -> tuple[T, ...]:
        """Of a member; () where it does not answer before it can serve no more."""
        out = partial(self.fleet.is_out, link, self.fleet.life(link.name))
        with contextlib.suppress(EngineError):
            return await answer_of(verb(link), out, self.fleet.lease)
        return ()


class _Reader(LinkOver):
    """A front's link to its own fleet, for what it reads from files: it leaves the GPUs, on which
    members run, alone.
    """

    def info(self) -> WeightInfo:
        info = super().info()
        if not info.device.startswith("cuda"):
            return info
        return replace(info, transports=tuple(x for x in info.transports if x != "ipc"))
