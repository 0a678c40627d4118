"""An engine in this process, as an asynchronous backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import rollout
from rollout.api.adapters import MAX_NAMES, MergedAdapters
from rollout.api.prompts import PromptPreparer
from rollout.api.running_calls import RunningCalls
from rollout.api.send_live import send_live
from rollout.api.visual_inputs import take_visuals
from rollout.config import EngineConfig
from rollout.distributed.futures import resolve
from rollout.engine.core import EngineCore
from rollout.engine.executors import Executor
from rollout.engine.facts import layer_settings
from rollout.engine.requests.recent_beginnings import RecentBeginnings
from rollout.engine.tokenizer import Tokenizer
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.lease import Lease
from rollout.engine.updates.near_link import NearLink
from rollout.engine.updates.rollback import Rollback, roll_back
from rollout.engine.updates.served_weights import ServedWeights
from rollout.engine.updates.verbs.session import VerbSession
from rollout.engine.updates.verbs.target import EngineTarget
from rollout.errors import (
    ConfigError,
    EngineClosed,
    EngineError,
    EngineRestarted,
    UpdateInProgress,
)
from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    Completion,
    RequestOutput,
    SamplingParams,
    parts_of,
)
from rollout.generation.metrics import EngineCounters, EngineStats
from rollout.loader.peft_adapter import MAX_RANK
from rollout.rpc.convert import Messages
from rollout.rpc.tls import ServerTls
from rollout.weight_sync.protocol.channel import WeightChannel
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
from rollout.weight_sync.protocol.messages import Decision, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.versions.adapter_files import AdapterFiles, adapter_directory
from rollout.weight_sync.versions.directories import readable, warn_of_absent
from rollout.weight_sync.versions.read_once import ReadOnce
from rollout.weights.adapters import AdapterLoaded
from rollout.wire.version import ServerInfo, Speaks


class EmbeddedBackend:
    """Owns an ``EngineCore``; outputs hop to the caller's loop. Only tokenising takes a thread of
    the loop's pool: loading has its own, as weight verbs have, and control waits without one.

    ``start`` loads the model once, whoever comes first; the other verbs need it done.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        """``executor``: the way to the ranks, where it is not the one that ``config`` names."""
        self.config = config
        self.core = EngineCore(config, executor=executor)
        self.prompts = PromptPreparer(self.core)
        self._calls = RunningCalls(self.core)
        self._beginnings = RecentBeginnings()
        self.adapters = MergedAdapters(config)
        self.served_adapters = AdapterFiles(lambda: self.core.adapters.versions)
        self._coordinator: Coordinator | None = None
        self._verbs: VerbSession | None = None
        self._reads = ReadOnce(self._is_live)
        self._start_lock = threading.Lock()  # loops of several threads may come first
        self._starting: Future[None] | None = None

    async def start(self) -> None:
        with self._start_lock:
            if self._starting is None:
                starting = Future[None]()
                starting.set_running_or_notify_cancel()  # no waiter's end is that of the loading
                load = starting, self._load
                threading.Thread(target=resolve, args=load, name="rollout-load").start()
                self._starting = starting
        await asyncio.wrap_future(self._starting)

    @property
    def seen(self) -> tuple[int | None, int]:
        return self.core.epoch, 0

    @property
    def is_loading(self) -> bool:
        over = self._starting is not None and self._starting.done()
        return self._verbs is None and not over and self.core.state != "closed"

    waits_for = ""

    async def state(self) -> str:
        if self.is_loading:
            return "loading"
        # Where loading has failed, the core may not have got as far as to know.
        return self.core.state if self._verbs is not None or self.core.state == "closed" else "dead"

    # ---- generation ----

    async def generate(
        self,
        prompts: Sequence[AnyPrompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        *,
        stream: bool,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        parts = [parts_of(prompt) for prompt in prompts]
        with self._calls.coming(request_ids, params) as call:
            ids = await self.prompts.token_ids([given for given, _, _ in parts])
            texts = [given if isinstance(given, str) else None for given, _, _ in parts]
            ids, placed = await self.prompts.placed(ids, [shown for _, shown, _ in parts])
            delivered = [done for _, _, done in parts]
            async with contextlib.aclosing(
                self._calls.run(call, ids, texts, params, request_ids, stream, placed, delivered)
            ) as outputs:
                async for item in outputs:
                    yield item

    @property
    def max_model_len(self) -> int:
        return self.core.max_model_len

    async def chat(
        self,
        conversations: Sequence[Messages],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        options: ChatOptions,
        *,
        stream: bool,
        delivered: Sequence[tuple[Completion, ...]] | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        with self._calls.coming(request_ids, params) as call:
            chats = await self.prompts.chats(conversations, options)
            ids, texts = [chat.token_ids for chat in chats], [chat.text for chat in chats]
            placed = [chat.placed for chat in chats]
            async with contextlib.aclosing(
                self._calls.run(call, ids, texts, params, request_ids, stream, placed, delivered)
            ) as outputs:
                async for item in outputs:
                    yield item

    async def tokenize(
        self,
        prompt: str | Messages,
        add_special_tokens: bool | None = None,
        options: ChatOptions | None = None,
    ) -> list[int]:
        if not isinstance(prompt, str):
            [chat] = await self.prompts.chats([prompt], options or ChatOptions())
            return chat.token_ids
        tokenizer = self.prompts.tokenizer("tokenize")
        special = True if add_special_tokens is None else add_special_tokens
        return await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens=special)

    async def render(self, messages: Messages, options: ChatOptions) -> str:
        tokenizer = self.prompts.tokenizer("a chat template")
        messages, _ = take_visuals(messages)
        return await asyncio.to_thread(tokenizer.render_chat, messages, options)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        coming = self._calls.abort_coming(request_ids)
        ids = list(self._calls.ids if request_ids is None else request_ids)
        return coming + await self.core.control.abort(ids)

    def end_calls(self, error: EngineError) -> None:
        """End every call under way with ``error``, at the next step; does not wait for it."""
        with contextlib.suppress(EngineError):  # it was never started, or is over
            self.core.at_step_boundary(lambda: self.core.outputs.fail(error))

    def leave(self) -> None:
        self.core.leaving = True

    @property
    def is_member(self) -> bool:
        left = self.core.serving.left
        return left is not None and left > 0

    @property
    def has_left(self) -> bool:
        copied = self._coordinator is not None and self._coordinator.turn.is_read
        return not (self._calls.ids or self.prepared or self.is_member or copied)

    # ---- control ----

    async def server_info(self) -> ServerInfo:
        core = self.core
        return ServerInfo(
            model=self.config.served_model_name or self.config.model,
            epoch=core.epoch,
            version=core.version,
            state=str(core.state),
            max_model_len=core.max_model_len,
            has_tokenizer=core.tokenizer is not None,
            package_version=rollout.__version__,
            world_size=self.config.num_ranks,
            software=Speaks.here().software,
            task="classify" if core.model_config.labels else "",
            settings=json.dumps(layer_settings(self.core.config)),
        )

    async def pause(self, mode: str, timeout: float) -> None:
        if mode == "abort":
            self._calls.abort_coming()
        await self.core.control.pause(mode, timeout)

    async def resume(self) -> None:
        await self.core.control.resume()

    async def sleep(self, level: int, mode: str, timeout: float) -> None:
        if self.prepared:  # what is staged would go, and with it the vote
            raise UpdateInProgress(f"update {self.prepared} waits for its decision: no sleep now")
        control = self.core.control
        if mode == "abort":
            self._calls.abort_coming()
        if mode == "wait" and not control.asleep:
            await control.finish_before_sleep(timeout)
        try:
            await control.sleep(level, mode, timeout)
        except BaseException:
            control.stay_awake()
            raise

    async def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        await self.core.control.wake_up(tags, timeout)

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        await self.core.control.reset_prefix_cache(reset_running_requests)

    async def stats(self) -> EngineStats:
        stats = self.core.stats()
        return replace(stats, waiting=stats.waiting + self._calls.num_coming)

    # ---- what servers need ----

    fleet = replicas = None

    @property
    def served(self) -> EmbeddedBackend:
        return self

    @property
    def counters(self) -> EngineCounters:
        return self.core.counters

    @property
    def directory(self) -> str:
        return self.core.directory

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.core.tokenizer

    @property
    def asleep(self) -> frozenset[str]:
        return frozenset(self.core.control.asleep)

    # ---- weights (blocking) ----

    @property
    def coordinator(self) -> Coordinator:
        if self._coordinator is None:
            raise EngineClosed("the engine has not been started: call start() first")
        return self._coordinator

    @property
    def verbs(self) -> VerbSession:
        if self._verbs is None:
            raise EngineClosed("the engine has not been started: call start() first")
        return self._verbs

    @property
    def link(self) -> NearLink:
        return NearLink(self.coordinator)

    def info(self) -> WeightInfo:
        return self.coordinator.info()

    def open(self) -> WeightChannel:
        return Lease(self.coordinator)

    @property
    def prepared(self) -> str:
        waiting = None if self._coordinator is None else self._coordinator.turn.prepared
        return "" if waiting is None else waiting.update_id

    def decide(self, decision: Decision) -> UpdateReceipt | None:
        return self.coordinator.decide(decision)

    def serve(self, grant: Grant) -> Standing:
        core, coordinator = self.core, self.coordinator
        if grant.epoch is not None and grant.epoch != core.epoch:
            raise EngineRestarted(
                f"the grant is for another life of this engine: epoch {grant.epoch}, not "
                f"{core.epoch}"
            )
        core.serving.check_fleet(grant.fleet)
        coordinator.see_fence(grant.fence, grant.fleet, asks=grant.epoch is None)
        if grant.epoch is not None:
            order = grant.fence, grant.serial
            core.serving.grant(
                grant.until, order, grant.returns, grant.fleet, removed=grant.removed
            )
        return Standing(
            epoch=core.epoch,
            clock=core.serving.clock(),
            version=core.version,
            state=core.state,
            prepared=self.prepared,
            fence=coordinator.fence,
            # One that leaves has not ended what nobody has read yet.
            running=max(len(core.scheduler.running), len(self._calls.ids) * core.leaving),
            waiting=core.scheduler.num_waiting,
            kv_usage=core.blocks.usage if grant.kv else 0.0,
        )

    def report(self, ask: AskReport) -> Report:
        """To a front of a fleet, which others may be beside; what is new of those beginnings that
        calls came with.
        """
        core = self.core
        since = ask.since if ask.life == core.epoch else 0
        serial, beginnings = self._beginnings.since(since)
        return Report(
            epoch=core.epoch, fleet=core.serving.fleet, state=core.state, version=core.version,
            calls=len(self._calls.ids), running=len(core.scheduler.running),
            waiting=core.scheduler.num_waiting, kv_usage=core.blocks.usage, serial=serial,
            beginnings=beginnings,
        )  # fmt: skip

    def note_routed(self, fleet: int, beginnings: Sequence[bytes]) -> None:
        if fleet:
            self.core.serving.check_under(fleet)
        for packed in beginnings:
            self._beginnings.add(packed)

    async def routes(self, ask: AskRoutes) -> Routes:
        raise ConfigError(
            "this is one engine: only the front of a fleet (`rollout fleet`, `rollout serve "
            "--replicas`) tells others where to route"
        )

    def send_to(self, request: SendTo, shown: ServerTls | None = None) -> UpdateReceipt:
        return send_live(self.coordinator, request, shown)

    def update_from(self, path: str, options: UpdateOptions) -> UpdateReceipt:
        return self.update_once(readable(path, self.config.weight_dirs, self.info()), options)

    def update_once(self, source: Any, options: UpdateOptions) -> UpdateReceipt:
        def read() -> UpdateReceipt:
            return publish(source, connect=lambda: self.link, options=options)

        return self._reads.run(options.update_id or "", options.timeout, read)

    @property
    def weight_dirs(self) -> Sequence[str]:
        return self.config.weight_dirs

    @property
    def max_adapters(self) -> int:
        return self.config.max_adapters

    @property
    def adapter_limits(self) -> tuple[int, int] | None:
        config = self.config
        if not config.weight_dirs:
            return None
        served = config.max_lora_rank, config.max_adapters
        return served if config.max_adapters else (MAX_RANK, MAX_NAMES)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return (self.served_adapters if self.config.max_adapters else self.adapters).names

    def load_lora_adapter(
        self, name: str, path: str, *, inplace: bool = False, anywhere: bool = True
    ) -> AdapterLoaded:
        """A PEFT directory's: into a slot, or where there are none merged into the weights."""
        self.core.serving.check_alone(f"adapter {name!r:.300}")
        config, where = self.config, Path(path).expanduser().absolute()
        if not anywhere:
            where = adapter_directory(name, path, config.weight_dirs)
        if config.max_adapters:
            version = self.served_adapters.load(
                name, where, self.link, inplace=inplace, timeout=config.timeout,
                base_names=(config.served_model_name, config.model),
            )  # fmt: skip
            return AdapterLoaded(name=name, version=version, merged=False)
        receipt = self.adapters.load(name, where, self.link, inplace=inplace)
        version = self.core.version if receipt is None else receipt.version
        return AdapterLoaded(name=name, version=version, merged=True)

    def unload_lora_adapter(self, name: str) -> bool:
        """Forget the name, and what was merged in it; whether it was there."""
        self.core.serving.check_alone(f"adapter {name!r:.300}")
        if self.config.max_adapters:
            return self.served_adapters.unload(name, lambda: self._forget(name))
        return self.adapters.unload(name, self.link)

    def _forget(self, name: str) -> bool:
        core, limit = self.core, self.config.timeout
        removed = core.loop.ask("an adapter's step", lambda: core.adapters.remove(name), limit)
        return removed.result() is not None

    def rollback(self, timeout: float) -> UpdateReceipt:
        return roll_back(self.coordinator, timeout)

    def prepare_rollback(self, request: PrepareRollback) -> None:
        Rollback.prepare(self.coordinator, request)

    def digests(self, timeout: float) -> dict[str, int]:
        return self.coordinator.digests(timeout)

    def save_sharded_state(self, path: str, timeout: float) -> int:
        return self.core.save_sharded_state(Path(path).expanduser(), timeout)

    def collective_rpc(
        self, method: str, args: list[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        call = {"method": method, "args": args, "kwargs": kwargs}
        replies = self.core.call_between_steps("collective_rpc", call, method, timeout)
        return [reply["result"] for reply, _ in replies]

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        return self.coordinator.receipts

    def committed_at(self, version: int) -> float | None:
        return self.coordinator.committed_at(version)

    def committed(self, receipt: UpdateReceipt, *, partial: bool) -> None:
        """Nothing to remember: an embedded engine has one life."""

    async def disconnect(self) -> None:
        """Nothing of the engine belongs to a loop."""

    def close(self) -> None:
        if self._verbs is not None:
            self._verbs.close()
        self.core.close()

    # ---- helpers ----

    def _load(self) -> None:
        warn_of_absent(self.config.weight_dirs)
        self.core.start()
        journal = self.core.journal
        self._coordinator = Coordinator(
            self.core,
            ServedWeights.of(self.core),
            note_version=None if journal is None else journal.version,
        )
        if journal is not None:
            found = self._coordinator.digests(self.config.start_timeout)
            journal.version(self.core.version, found)
        self._verbs = VerbSession(EngineTarget(self._coordinator))

    def _is_live(self, receipt: UpdateReceipt) -> bool:
        """Whether what is served is still what that update brought, whole; beneath adapters."""
        return receipt.version == self.core.base_version and self.core.broken is None
