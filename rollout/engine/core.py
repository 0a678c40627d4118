"""One engine: what it loads and sizes at start, and everything that may be asked of it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rollout.config import EngineConfig
from rollout.distributed import choose_device
from rollout.engine.adapters.places import AdapterPlaces, Move
from rollout.engine.adapters.table import AdapterTable
from rollout.engine.control import ASLEEP, Control
from rollout.engine.executors import (
    Executor,
    gather_replies,
    make_executor,
    replies_by_now,
)
from rollout.engine.facts import engine_facts
from rollout.engine.loaded_model import LoadedModel
from rollout.engine.loop import StepLoop
from rollout.engine.memory_plan import (
    KVSize,
    MemoryPlan,
    mib,
    plan_memory,
    reported_groups,
    served_length,
    size_kv,
)
from rollout.engine.pause_state import PAUSED
from rollout.engine.pins import Pins, PinTerms
from rollout.engine.requests.call_admission import CallAdmission
from rollout.engine.requests.input_processor import InputProcessor
from rollout.engine.requests.journal import Journal
from rollout.engine.requests.output import OutputProcessor
from rollout.engine.requests.request_state import RequestState, Sink
from rollout.engine.resolved_model import ResolvedModel
from rollout.engine.scheduling.drafter import Drafter
from rollout.engine.scheduling.grouped_blocks import make_block_manager
from rollout.engine.scheduling.model_drafter import ModelDrafter
from rollout.engine.scheduling.ngram_drafter import NgramDrafter
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.state_slots import StateSlots
from rollout.engine.serving_lease import LEAVING, ServingLease
from rollout.engine.structured.grammars import Grammars
from rollout.engine.tokenizer import Tokenizer
from rollout.engine.version_switch import VersionSwitch
from rollout.engine.visuals.encoder_cache import EncoderCache
from rollout.engine.visuals.limits import VisualLimits
from rollout.engine.visuals.processor import VisualProcessor
from rollout.engine.worker.graphs.decode_graphs import check_graphs
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineClosed,
    InvalidRequest,
    RolloutError,
    UpdateInProgress,
    WorkerDied,
    some,
)
from rollout.generation import Request
from rollout.generation.metrics import EngineCounters, EngineStats
from rollout.loader import complete_save, portable
from rollout.models.build import check_stages
from rollout.models.config.model import ModelConfig
from rollout.weight_sync.protocol.messages import IN_FLIGHT
from rollout.wire.frames import Reply, dtype_from_name

log = logging.getLogger(__name__)
T = TypeVar("T")
_LOOK = 0.05  # seconds between two looks at whether an update is over


class EngineCore:
    """One engine, from ``start`` to ``close``. Every public method is thread-safe.

    ``epoch`` is drawn at random for each start. ``seed`` is the config's, or random, and serves
    requests that bring none. ``version`` is the weight version of the next step. ``executor``
    overrides the one that ``config`` names. After ``start``: ``model_config``,
    ``tokenizer`` (None: token ids only), ``max_model_len``, ``num_kv_blocks``, ``memory``, and
    ``rank_info``, the ranks' start replies.
    """

    def __init__(self, config: EngineConfig, *, executor: Executor | None = None) -> None:
        self.config = config
        self.epoch = secrets.randbits(48)
        self.seed = secrets.randbits(63) if config.seed is None else config.seed
        self.version = 0
        self.counters = EngineCounters()
        self.serving = ServingLease()
        self.leaving = False  # it takes no new requests any more
        self.model_config: ModelConfig
        self.memory: MemoryPlan
        self.kv_size: KVSize
        self.tokenizer: Tokenizer | None = None
        self.max_model_len = 0
        self.num_kv_blocks = 0
        self.rank_info: list[dict[str, Any]] = []
        slots, setting = config.max_adapters, "max_adapters"
        self.places: AdapterPlaces | None = None
        if config.max_cpu_loras > slots:
            self.places = AdapterPlaces(slots, self._places_held, self._tell_places)
            slots, setting = config.max_cpu_loras, "max_cpu_loras"
        self.adapters = AdapterTable(slots, self._adapters_in_use, setting)
        self.grammars: Grammars | None = None
        self.visuals: VisualProcessor | None = None
        self.journal: Journal | None = None
        self._encoder: EncoderCache | None = None
        self._executor = executor
        self._loop: StepLoop | None = None
        self._control: Control | None = None
        self.died: Future[WorkerDied] = Future()  # resolved when a rank's process has ended
        self._close_lock = threading.Lock()
        self._closed = False

    # ---- life ----

    def start(self) -> None:
        """Load everything and begin to serve; a bad checkpoint is refused before any rank starts.

        Raises ``ConfigError``, ``WorkerDied`` or ``DeadlineExceeded`` and leaves nothing running.
        """
        config = self.config
        if config.resolved_executor != "ray":  # whose ranks have the devices of other machines
            check_graphs(config, choose_device(config.device))
        if config.journal is not None:
            self.journal = Journal(Path(config.journal).expanduser(), config.journal_bytes)
        found = ResolvedModel.of(config)
        self.config = config = found.settled(config)
        self.model_config = found.config
        self.model_config.check_tensor_parallel(config.tensor_parallel_size, config.expert_parallel)
        check_stages(self.model_config, config.pipeline_parallel_size)
        # What cannot be served is refused before any rank starts.
        served_length(config, self.model_config.max_position_embeddings)
        self.tokenizer = found.load_tokenizer(config)
        self._directory = str(found.directory)
        self._components = {name: found.component(config, name) for name in config.components}
        with self._close_lock:  # from here on ``close`` ends the executor
            if self._closed:
                raise EngineClosed("the engine was closed while it started")
            executor = self._executor = self._executor or make_executor(_for_ranks(config))
        try:
            executor.start()
            self.rank_info = [reply for reply, _ in self._ask("info", {}, config.start_timeout)]
            self._size()
            self._build(executor)
            sizes = {
                "num_blocks": self.num_kv_blocks, "num_states": self.kv_size.num_states,
                "max_model_len": self.max_model_len,
            }  # fmt: skip
            self._ask("init_kv", sizes, config.start_timeout)
        except BaseException:
            self.close()
            raise
        executor.on_death = self._on_death
        with self._close_lock:
            if self._closed:
                raise EngineClosed("the engine was closed while it started")
            if self.journal is not None:
                self.journal.start(engine_facts(config, self.epoch, self.rank_info))
            self.loop.start()

    def _size(self) -> None:
        config, longest = self.config, self.model_config.max_position_embeddings
        size = self.kv_size = size_kv(config, longest, self.rank_info)
        self.max_model_len, self.num_kv_blocks = size.max_model_len, size.num_blocks
        self.memory = plan_memory(config, size, self.rank_info)
        for reply in self.rank_info:
            log.info(
                "rank %d read %s in %.2f s and holds %s of weights on %s, %.2f s after its start",
                *(reply["rank"], mib(reply["bytes_read"]), reply["read_seconds"]),
                *(mib(reply["weight_bytes"]), reply["device"], reply["seconds"]),
            )
        log.info("memory %s; seed %d", self.memory, self.seed)
        if self.max_model_len < served_length(config, longest):
            log.warning(
                "sequences end at %d tokens, not at the model's %d: the %d KV blocks hold no "
                "longer one; raise num_kv_blocks or kv_cache_bytes, or set max_model_len",
                *(self.max_model_len, longest, self.num_kv_blocks),
            )
        if size.windows:
            log.info("windows: %s", size.windows)

    def _build(self, executor: Executor) -> None:
        config, size = self.config, self.kv_size
        model = LoadedModel(
            config=self.model_config, tokenizer=self.tokenizer, ranks=self.rank_info
        )
        self._warn_of_nonfinite(model.nonfinite)
        self.inputs = InputProcessor(
            model, self.max_model_len, seed=self.seed, max_queued=config.max_queued_requests,
            max_per_call=config.max_seqs_per_call, adapters=self.adapters,
            num_waiting=lambda: self.scheduler.num_waiting,
        )  # fmt: skip
        if self.tokenizer is not None:
            vocab_size = self.model_config.vocab_size
            self.grammars = Grammars(
                self.tokenizer.path, vocab_size, model.eos_ids,
                trust_remote_code=config.trust_remote_code, code_revision=config.code_revision,
            )  # fmt: skip
        self._build_visuals()
        device = str(self.rank_info[0]["device"]).partition(":")[0]
        states = None
        if size.running:
            states = StateSlots(size.running, size.snapshots, config.state_snapshot_blocks)
        groups = reported_groups(self.rank_info[0])
        self.blocks = make_block_manager(config, size.num_blocks, groups, self.epoch, states)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=size.running or config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, places=self.places,
            drafter=self._drafter(config), max_drafting=config.max_drafting(device),
        )  # fmt: skip
        self.outputs = OutputProcessor(
            model, self.scheduler, self.counters, epoch=self.epoch,
            live_ids=self.inputs.live_ids, journal=self.journal, adapters=self.adapters,
        )  # fmt: skip
        self.pins = Pins(self.scheduler, self.outputs, self.counters)
        self._switch = VersionSwitch(
            self.scheduler, self.outputs, self.pins, self.adapters,
            config.max_staleness, config.on_stale,
        )  # fmt: skip
        self._loop = StepLoop(
            executor, self.scheduler, self.outputs, block_size=config.block_size,
            step_timeout=config.timeout, runs_ahead=config.runs_ahead(device),
            first_timeout=max(config.timeout, config.start_timeout), on_broken=self.mark_broken,
            grammars=self.grammars, encoder=self._encoder, serving=self.serving, pins=self.pins,
            places=self.places,
        )  # fmt: skip
        self._admission = CallAdmission(
            self.inputs, self.outputs, self._refusal, self._loop.at_boundary, self._took_on
        )
        self._control = Control(
            self._loop, self.scheduler, self.outputs, self.pins, self.call, config.timeout
        )

    def _drafter(self, config: EngineConfig) -> Drafter | None:
        """None: nothing is drafted."""
        most = config.num_speculative_tokens
        if not most:
            return None
        if config.draft_component is not None:
            longest = min(int(r["draft_longest"]) for r in self.rank_info)
            is_head = bool(self.rank_info[0]["drafts_by_head"])
            return ModelDrafter(most, longest, is_head=is_head)
        lengths = config.prompt_lookup_min, config.prompt_lookup_max
        return NgramDrafter(most, *lengths, config.speculative_history_tokens)

    def _build_visuals(self) -> None:
        config, vision = self.config, self.model_config.vision
        if vision is None:
            return
        dtype = dtype_from_name(self.rank_info[0]["dtype"])
        limits = VisualLimits(
            max_images=config.max_images,
            max_pixels=config.max_image_pixels,
            max_videos=config.max_videos,
            max_video_frames=config.max_video_frames,
            max_video_pixels=config.max_video_pixels,
            max_tokens=self.max_model_len,
        )
        encode = None
        if self.tokenizer is not None:
            encode = partial(self.tokenizer.encode, add_special_tokens=False)
        self.visuals = VisualProcessor.load(self._directory, vision, limits, dtype, encode)
        self._encoder = EncoderCache(config.encoder_cache_bytes, vision.features * dtype.itemsize)

    def save_sharded_state(self, directory: Path, timeout: float) -> int:
        """Write every rank's live weights, config and tokenizer to ``directory``; returns their
        version, ``base_version``. Waits while an update overwrites them.
        """
        if self.config.quantization != "none":
            raise ConfigError(
                f"save_sharded_state: quantization={self.config.quantization!r} holds codes, and "
                "what is read back of them has other scales and digests; save from the trainer or "
                "from an engine without quantization"
            )
        save = f"{self.epoch}:{self.base_version}:{secrets.token_hex(8)}"
        args = {"directory": str(directory.absolute()), "save": save}
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                replies = self.call_between_steps(
                    "save_shard", args, "save_shard", left, check=self._check_not_overwritten
                )
                break
            except UpdateInProgress:
                if left < 2 * _LOOK:
                    raise
                time.sleep(_LOOK)
        sources = {directory: Path(self._directory)}
        for component, source in self._components.items():
            sources[directory / component] = source
        for place, source in sources.items():
            complete_save(place, self.config.num_ranks, source)
        return int(replies[0][0]["version"])

    def close(self) -> None:
        """End everything: pending calls get ``EngineClosed``, ranks end. Idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            running = self._loop is not None and self._loop.started
            if self._loop is not None and running:
                self._loop.stop()
            if self.journal is not None:
                self.journal.close()
            if self.grammars is not None:
                self.grammars.close()
            if self._executor is not None:
                self._executor.close()  # frees a thread that still waits for its step
            if self._loop is not None and running:
                self._loop.stop()

    @property
    def loop(self) -> StepLoop:
        if self._loop is None:
            raise EngineClosed("the engine has not been started")
        return self._loop

    @property
    def control(self) -> Control:
        if self._control is None:
            raise EngineClosed("the engine has not been started")
        return self._control

    @property
    def directory(self) -> str:
        """Where the model's config.json is."""
        return self._directory

    @property
    def broken(self) -> str | None:
        """Why the live weights are not those of a single version; None if they are, and where dead
        ranks hold none.
        """
        dead = self._loop is not None and self._loop.dead is not None
        return None if dead or self._control is None else self._control.broken

    @property
    def state(self) -> str:
        """starting | running | paused | asleep | broken | fenced | leaving | dead | closed.

        "running" also while an update holds requests back for a moment: they are served after it.
        """
        if self._closed:
            return "closed"
        if self._loop is None:
            return "starting"
        if self._loop.dead is not None:
            return "dead"
        if self.leaving:
            return "leaving"
        if self.control.asleep:
            return "asleep"
        if self.broken is not None:
            return "broken"
        if self.serving.is_over:
            return "fenced"
        return "paused" if self._loop.pause_state.is_held_by("pause") else "running"

    # ---- requests ----

    def submit(
        self,
        requests: Sequence[Request],
        sink: Sink,
        *,
        stream: bool,
        aborted: Set[str] = frozenset(),
    ) -> None:
        """Admit all requests together, in one scheduling step, or raise for all of them.

        ``sink`` is called from the engine's thread and must not block. It gets cumulative
        snapshots as tokens arrive if ``stream``, otherwise each request's final one; an error
        ends the whole call. Raises ``InvalidRequest`` or ``PromptTooLong`` for a bad
        request, ``EngineOverloaded`` while too much waits, an ``EngineError`` while the engine
        cannot serve. ``aborted``: the ids of those that end as they are admitted, read only then;
        a call that has no others needs no engine that serves.
        """
        refusal = self._refusal()
        if refusal is not None and (not aborted or {r.request_id for r in requests} - aborted):
            raise refusal
        if requests:
            self._admission.take(requests, sink, stream=stream, aborted=aborted)

    def _took_on(self, states: list[RequestState]) -> None:
        """In the engine's thread, of a call that was queued now."""
        self._switch.judge(states)
        if self.loop.pause_state.note("pause"):
            first = states[0].request.request_id
            log.warning("%s: request %s waits, as will those after it", PAUSED, first)

    def stats(self) -> EngineStats:
        """A snapshot; takes no lock and waits for nothing."""
        counted = self.counters.snapshot()
        if self.blocks.states is not None:
            counted |= self.blocks.states.stats()
        if self._encoder is not None:
            counted |= self._encoder.figures.stats()
        lease = self.serving.left
        return EngineStats(
            state=self.state,
            paused=self.loop.pause_state.is_held_by("pause"),
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            kv_usage=self.blocks.usage,
            num_kv_blocks=self.num_kv_blocks,
            preemptions_total=self.scheduler.preemptions,
            prefix_cache_queries_total=self.blocks.query_tokens,
            prefix_cache_hits_total=self.blocks.hit_tokens,
            epoch=self.epoch,
            seed=self.seed,
            weight_version=self.version,
            adapters=self.adapters.versions,
            fleet=self.serving.fleet,
            serving_lease=None if lease is None else max(lease, 0.0),
            pinned_requests=self.pins.count,
            pinned_version=-1 if self.pins.version is None else self.pins.version,
            **counted,
        )

    # ---- what an update uses ----

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]:
        """Enqueue a call on every rank; calls and steps run in the order of enqueueing."""
        if self._loop is not None and self._loop.dead is not None:
            raise WorkerDied(str(self._loop.dead))
        if self._closed or self._executor is None:
            raise EngineClosed("the engine is closed")
        return self._executor.call(method, args, tensors)

    def call_between_steps(
        self,
        method: str,
        args: Mapping[str, Any],
        phase: str,
        timeout: float,
        check: Callable[[], None] = lambda: None,
    ) -> list[Reply]:
        """A call that may take longer than a step may: every rank's reply, by rank. What ``check``
        raises just before it is raised instead.

        Until all have replied no step begins, nor anything else that waits for a step boundary:
        behind this call on the ranks its own deadline would pass. ``timeout`` seconds end the
        caller's wait alone; ``DeadlineExceeded`` names the ranks that are silent, and the
        ``phase``.
        """
        asked: list[Future[Reply]] = []

        def boundary() -> None:
            check()
            asked.extend(self.call(method, args))
            wait(asked)  # until the ranks have replied or end

        ended = self.at_step_boundary(boundary)
        wait((ended,), timeout)
        if ended.cancel():
            raise DeadlineExceeded(f"no step boundary came within {timeout:g} s (phase: {phase})")
        if ended.done():
            ended.result()
        # An executor may run a call in the thread that asks, which has no reply to wait for yet.
        return replies_by_now(asked or [Future() for _ in self.rank_info], phase, timeout)

    def buffer(self, nbytes: int) -> Tensor | None:
        """Memory from which a call's tensor reaches the ranks without a copy, if there is any."""
        return None if self._executor is None else self._executor.buffer(nbytes)

    @property
    def reads_on(self) -> str:
        """The device of the only rank if it runs in this process, otherwise ""."""
        inside = self._executor is not None and self._executor.runs_here
        return str(self.rank_info[0]["device"]) if inside else ""

    @property
    def one_host(self) -> bool:
        """Whether every rank can map what processes of this machine and user share."""
        return self._executor is None or self._executor.one_host

    def at_step_boundary(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` in the engine's thread between two steps; boundaries keep their order."""
        return self.loop.at_boundary(fn)

    def on_commit(
        self,
        version: int,
        in_flight: str,
        pin: PinTerms | None = None,
        *,
        models: bool = True,
        adapters: Collection[str] = (),
        name: Callable[[int], object] = lambda version: None,
    ) -> None:
        """Inside a boundary: the live weights are those of ``version``, a newer one, from now on.

        ``in_flight`` says what becomes of the requests that the old version has begun, but for
        those that ask to be pinned. ``pin``: on which terms they are, and all are with "pin"; it
        needs that no pins last. None, or an old version that cannot run: what asks is as the
        others, and what the update would pin falls back at once.
        ``models`` False: ``adapters`` alone have changed, which ``name`` gives their new versions;
        the caches of all else, and pins, stay. What has begun with one goes on with the version
        that it has, but where it is computed again. Where this raises, names mean what they meant.
        """
        if in_flight not in IN_FLIGHT:
            raise InvalidRequest(f"in_flight must be one of {', '.join(IN_FLIGHT)}")
        assert self.loop.is_current_thread, "commit outside a step boundary"
        assert version > self.version, "versions only grow"
        if pin is None or self.broken is not None or self.control.asleep:
            fallback, pin = "keep" if pin is None else pin.fallback, None
            in_flight = fallback if in_flight == "pin" else in_flight
        self._switch.to(
            version, in_flight, pin, models=models, adapters=adapters, name=lambda: name(version)
        )
        self.version = version
        if models:  # adapters say nothing of the weights that they are added to
            self.mark_broken(None)

    def end_pins(self, why: str, timeout: float) -> None:
        """Have pinned requests take their fallback at the next step boundary."""
        self.loop.ask("end of the pins", lambda: self.pins.end(why), timeout).result()

    @property
    def base_version(self) -> int:
        """The version that the ranks hold; commits of adapters alone do not change it."""
        return self.blocks.version

    def check_whole(self) -> None:
        """Raise ``EngineBroken`` if the live weights are not those of a single version."""
        if self.broken is not None:
            raise EngineBroken(self.control.broken_text)

    def _check_not_overwritten(self) -> None:
        """At a step boundary: raise where what the ranks hold live is no single version."""
        self.check_whole()
        if self.loop.pause_state.is_frozen_by("hold"):
            raise UpdateInProgress(
                "an update without staging overwrites the live weights: save once it has ended"
            )

    def mark_broken(self, reason: str | None) -> None:
        """Refuse generation with ``EngineBroken`` and end pending requests; None: healthy again."""
        self.control.mark_broken(reason)

    # ---- helpers ----

    def _adapters_in_use(self) -> set[int]:
        live = (seq.adapter for seq in self.scheduler.sequences())
        return {adapter.slot for adapter in live if adapter is not None}

    def _places_held(self) -> set[int]:
        running = (seq.adapter for seq in self.scheduler.running)
        return {one.slot for one in running if one is not None}

    def _tell_places(self, moves: list[Move]) -> None:
        asked = self.call("move_adapters", {"moves": [[*move] for move in moves]})
        gather_replies(asked, "moving adapters", self.config.timeout)

    def _on_death(self, error: WorkerDied) -> None:
        """From the executor's thread, once."""
        log.error("%s (weight version %d was live)", error, self.version)
        self.loop.die(error)
        if not self.died.done():
            self.died.set_result(error)

    def _warn_of_nonfinite(self, names: list[str]) -> None:
        """A checkpoint with NaN is served all the same: somebody may want to look into it."""
        self.counters.nonfinite_tensors = len(names)
        if names:
            log.warning(
                "the checkpoint's weights hold NaN or infinity in %s: what is generated will be "
                "meaningless",
                some(names),
            )

    def _refusal(self) -> RolloutError | None:
        """Why no request can be taken now, if so."""
        if self._closed or self._loop is None:
            return EngineClosed("the engine is not running")
        if self._loop.dead is not None:
            return WorkerDied(str(self._loop.dead))
        if self.leaving:
            return EngineClosed(LEAVING)
        if self.control.asleep:
            return EngineClosed(ASLEEP)
        if self.broken is not None:
            return EngineBroken(self.control.broken_text)
        if self.serving.is_over:
            return self.serving.refusal
        return None

    def _ask(self, method: str, args: Mapping[str, Any], timeout: float) -> list[Reply]:
        return gather_replies(self.call(method, args), method, timeout)


def _for_ranks(config: EngineConfig) -> EngineConfig:
    """For ranks in other processes, which import load formats that were registered here."""
    if config.resolved_executor == "inline":
        return config
    return replace(config, load_format=portable(config.load_format))
