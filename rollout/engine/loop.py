"""The engine's thread: inbox, schedule, step, publish, for ever.

    boundary fns --> inbox --> [ take inbox -> schedule -> Executor.call("step") -> book -> sinks ]

Everything that touches sequences or blocks runs in this thread, between two steps, in the order in
which it was asked for. With ``runs_ahead`` the ranks get the next step before the tokens of this
one are booked, so that they do not wait for this thread. No step is begun ahead while the inbox
holds anything, and the inbox is emptied only when no step is running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rollout.distributed.futures import resolve
from rollout.distributed.native_thread import NativeThread
from rollout.engine.adapters.places import AdapterPlaces
from rollout.engine.deadline_future import DeadlineFuture
from rollout.engine.executors import Executor, settled
from rollout.engine.pause_state import PAUSED, PauseState
from rollout.engine.pins import Pins
from rollout.engine.requests.output import OutputProcessor
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.sequences.sequence import ScheduledBatch, Status
from rollout.engine.serving_lease import ServingLease
from rollout.engine.steps.batch import encode_batch
from rollout.engine.steps.batch_encoder import BatchEncoder
from rollout.engine.structured.grammars import Grammars
from rollout.engine.visuals.encoder_cache import EncoderCache
from rollout.errors import (
    EngineBroken,
    EngineClosed,
    EngineError,
    RolloutError,
    WorkerDied,
)
from rollout.wire.frames import Reply

T = TypeVar("T")
_SETTLE_WAIT = 3.0  # seconds for the other ranks once one has failed a step
_MASK_GRACE = 0.05  # seconds that a step waits, once for each token, for what follows grammars
_CLOSE_WAIT = 5.0  # seconds for a step under way to end before its ranks are ended

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that has been sent to the ranks."""

    batch: ScheduledBatch
    futures: list[Future[Reply]]
    patches: int = 0  # of what it encodes


class StepLoop:
    """Drives one scheduler over one executor. Public methods are thread-safe.

    ``on_broken(reason)`` is called, in this thread, when ranks disagree about the version or one
    does not answer a step within ``step_timeout`` seconds, or twice what the longest step so far
    took. The first step may compile and warm up, and one with more tokens or image patches than any
    before it may take longer than all of them: these get ``first_timeout``.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        *,
        block_size: int,
        step_timeout: float,
        first_timeout: float,
        runs_ahead: bool,
        on_broken: Callable[[str], None],
        grammars: Grammars | None = None,
        encoder: EncoderCache | None = None,
        serving: ServingLease | None = None,
        pins: Pins,
        places: AdapterPlaces | None = None,
    ) -> None:
        self.pause_state = PauseState(scheduler)
        self.dead: WorkerDied | None = None
        self.closed = False
        self.runs_ahead = runs_ahead
        self.steps_ahead = 0  # begun before the one ahead of them had ended
        self._executor = executor
        self._scheduler = scheduler
        self._outputs = outputs
        self.encoder = BatchEncoder(block_size)
        self._step_timeout, self._first_timeout = step_timeout, first_timeout
        self._longest = 0.0  # seconds, of the steps so far
        self._most_tokens = self._most_patches = 0  # in one of them
        self._on_broken = on_broken
        self._grammars = grammars
        self._encoder, self._pins, self._places = encoder, pins, places
        if grammars is not None:
            grammars.on_answer = self._wake
        self._serving = serving or ServingLease()
        self._serving.on_grant = self._wake
        self._inbox: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._ahead: _Begun | None = None
        self._ended = False
        self._end_lock = threading.Lock()
        self._drains: list[Future[None]] = []
        self._thread = NativeThread("rollout-engine", self._run, self._tell_to_end)

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Ask the thread to end and wait briefly; False if a step is still running."""
        self._tell_to_end()
        self._thread.join(_CLOSE_WAIT)
        return not self._thread.is_alive()

    def die(self, error: WorkerDied) -> None:
        """A rank has died: end everything pending with ``error``. Called from any thread."""
        self.dead = self.dead or error
        self.at_boundary(lambda: self._outputs.fail(error))

    def at_boundary(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` between two steps; the future carries its result or its error."""
        future: Future[T] = Future()
        with self._end_lock:
            if not self._ended:
                self._inbox.put((fn, future))
                return future
        future.set_exception(EngineClosed("the engine was shut down"))
        return future

    def ask(self, what: str, fn: Callable[[], T], timeout: float) -> DeadlineFuture[T]:
        """Run ``fn`` between two steps; ``what`` names it at its deadline."""
        if self.is_current_thread:
            future: Future[T] = Future()
            future.set_result(fn())
            return DeadlineFuture(future, what, timeout)
        if self.dead is not None:
            raise WorkerDied(str(self.dead))
        return DeadlineFuture(self.at_boundary(fn), what, timeout)

    def ask_drained(self, gate: str, timeout: float) -> DeadlineFuture[None]:
        """Shut ``gate`` once everything that has begun is finished; until then admit nothing.

        If the wait ends in any other way, the gate stays as it was.
        """
        drained: Future[None] = Future()

        def shut() -> None:
            self.pause_state.wait_behind(gate, drained)
            self._drains.append(drained)

        def refused(asked: Future[None]) -> None:
            error = asked.exception()
            if error is not None and drained.set_running_or_notify_cancel():
                drained.set_exception(error)

        def give_up() -> None:
            self.at_boundary(lambda: self.pause_state.stop_waiting(drained, stay_shut=False))

        def why() -> str:
            return f": {PAUSED}" if self.pause_state.is_frozen_by("pause") else ""

        if self.dead is not None:
            raise WorkerDied(str(self.dead))
        self.at_boundary(shut).add_done_callback(refused)
        return DeadlineFuture(drained, f"{gate}: running requests", timeout, give_up, why)

    def _wake(self) -> None:
        self._inbox.put((lambda: None, Future()))

    def _tell_to_end(self) -> None:
        self.closed = True
        self._wake()

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while not self.closed:
                worked = self._step()
                left = self._serving.left
                if left is not None and left <= 0:
                    self._outputs.fail(self._serving.refusal)
                    left = None
                limit = self._pins.look() if self._ahead is None else None
                self._outputs.publish()
                self._notify_drained()
                if self._ahead is None:
                    # What is frozen ends with the lease, too.
                    limits = (each for each in (limit, left) if each is not None)
                    self._take_inbox(wait=not worked, limit=min(limits, default=None))
                    self._outputs.publish()
        finally:
            if self._ahead is not None:
                settled(self._ahead.futures, _CLOSE_WAIT)
            self.closed = True
            self._outputs.fail(self.dead or EngineClosed("the engine was shut down"))
            self._pins.look()
            with self._end_lock:
                self._ended = True
            self._refuse_rest()

    def _take_inbox(self, wait: bool, limit: float | None) -> None:
        """Run everything asked for so far; ``wait``: block for something, ``limit`` s at most."""
        while not self.closed:
            try:
                fn, future = self._inbox.get(block=wait, timeout=limit)
            except Empty:
                return
            wait = False
            if future.set_running_or_notify_cancel():
                resolve(future, fn)

    def _refuse_rest(self) -> None:
        error = EngineClosed("the engine was shut down")
        waiting = [*self._drains]
        self._drains.clear()
        while not self._inbox.empty():
            waiting.append(self._inbox.get()[1])
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _notify_drained(self) -> None:
        if not self._drains or not (self._scheduler.drained or self.dead):
            return
        drains, self._drains = self._drains, []
        for future in drains:
            waited = future.set_running_or_notify_cancel()
            self.pause_state.stop_waiting(future, stay_shut=waited and not self.dead)
            if waited and self.dead:
                future.set_exception(self.dead)
            elif waited:
                future.set_result(None)

    def _step(self) -> bool:
        """Run one step if there is work; an error ends the requests that it is about."""
        begun, self._ahead = self._ahead, None
        if self.dead is not None:
            return False
        batch = self._scheduler.schedule() if begun is None else begun.batch
        if not batch.entries:
            return False
        try:
            begun = begun or self._begin(batch)
            if begun is None:  # work there is if somebody has ended; masks wake the inbox
                return len(batch.rows_running) < len(batch.entries)
            batch = begun.batch
            if self.runs_ahead and self._inbox.empty():
                ahead = self._scheduler.schedule_ahead(batch)
                if ahead.entries:
                    self._ahead = self._begin_ahead(ahead)
                    self.steps_ahead += self._ahead is not None
            self._outputs.step(batch, self._end(begun))
        except Exception as error:  # noqa: BLE001 - one bad step must not end the thread
            next_one, self._ahead = self._ahead, None  # all of its requests end here, too
            self._failed(batch, error)
            if next_one is not None and not settled(next_one.futures, _SETTLE_WAIT):
                self._on_broken(f"the step after one that failed did not end: {error}")
        return True

    def _failed(self, batch: ScheduledBatch, error: Exception) -> None:
        if self._encoder is not None:
            self._encoder.forget()
        if isinstance(error, WorkerDied):
            self.dead = self.dead or error
            self._outputs.fail(self.dead)
        elif isinstance(error, EngineBroken):
            self._on_broken(str(error))
            self._outputs.fail(error)
        else:
            log.error("a step failed", exc_info=error)
            text = f"a step failed: {type(error).__name__}: {error}"
            failure = error if isinstance(error, RolloutError) else EngineError(text)
            self._scheduler.blocks.forget_drafted()
            self._outputs.fail(failure, {entry.sequence.request_id for entry in batch.entries})

    def _begin(self, batch: ScheduledBatch) -> _Begun | None:
        """Send a step to the ranks; None if nothing is left of it.

        A request that cannot be encoded ends; the rest of the step goes on.
        """
        if self._places is not None:
            self._places.tell()  # first: if it fails, all that was to be moved fails with it
        batch = self._constrained(batch)
        if not batch.entries:
            return None
        try:
            args, tensors = self.encoder.encode(batch)
            if self._encoder is not None:
                chain = self._scheduler.blocks.chain_of(batch.version)
                visuals, pixels = self._encoder.plan(batch, chain)
                args, tensors = args | visuals, tensors | pixels
        except Exception:
            bad = self._unencodable(batch)
            if not bad:
                raise  # no single one is to blame
            for request_id, error in bad.items():
                log.error("request %r cannot be encoded", request_id, exc_info=error)
                text = f"request {request_id!r} cannot be encoded: {type(error).__name__}: {error}"
                self._outputs.fail(EngineError(text), [request_id])
            rest = batch.rows(self._running(batch))
            return self._begin(rest) if rest.entries else None
        patches = len(tensors.get("pixels", ()))
        return _Begun(batch, self._executor.call("step", args, tensors), patches)

    def _constrained(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The batch without the rows whose grammars have not produced a mask yet.

        Those go into a later step; this one waits for them only briefly. A request that its
        grammar does not let continue ends.
        """
        bound = [entry for entry in batch.entries if entry.sequence.waits_for_mask]
        if not bound or self._grammars is None:
            return batch
        followed = self._grammars.followed
        new = followed.ask([entry.sequence for entry in bound])
        drawing = {entry.sequence.seq_id for entry in bound if entry.samples}
        followed.wait([seq for seq in new if seq.seq_id in drawing], _MASK_GRACE)
        for seq, verdict in followed.take():
            if seq.status is Status.FINISHED:
                continue  # its call ended a moment ago
            if verdict is None:
                self._outputs.complete(seq)
            elif isinstance(verdict, Exception):
                self._outputs.fail(verdict, [seq.request_id])
            else:
                seq.mask = verdict
        ready = [not (entry.samples and entry.sequence.waits_for_mask) for entry in batch.entries]
        return batch.rows([row for row in self._running(batch) if ready[row]])

    def _running(self, batch: ScheduledBatch) -> list[int]:
        """Rows of those that still run; what a draft model was to read of the others it has not."""
        rows = batch.rows_running
        if batch.runs_draft and len(rows) < len(batch.entries):
            self._scheduler.blocks.forget_drafted()
        return rows

    def _begin_ahead(self, batch: ScheduledBatch) -> _Begun | None:
        """If it cannot be encoded, it waits for its turn, when its sequences may be ended."""
        try:
            args, tensors = self.encoder.encode(batch)
        except Exception:
            log.exception("a step could not be begun ahead")
            return None
        return _Begun(batch, self._executor.call("step", args, tensors))

    def _unencodable(self, batch: ScheduledBatch) -> dict[str, Exception]:
        """Ids of the requests that cannot even be encoded alone, and why."""
        found: dict[str, Exception] = {}
        for row, entry in enumerate(batch.entries):
            try:
                encode_batch(batch.rows([row]), self.encoder.block_size)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this entry's
                found[entry.sequence.request_id] = error
        return found

    def _end(self, begun: _Begun) -> SamplerOutput:
        try:
            replies = self._replies(begun.futures, begun.batch.num_tokens, begun.patches)
        except WorkerDied:
            raise
        except RolloutError as error:
            _settle(begun.futures, error)
            raise
        versions, expected = [int(header["version"]) for header, _ in replies], begun.batch.version
        if any(version != expected for version in versions):
            raise EngineBroken(
                f"ranks ran a step with weight versions {versions}, expected {expected}"
            )
        return SamplerOutput.from_tensors(replies[0][1])

    def _replies(self, futures: list[Future[Reply]], tokens: int, patches: int) -> list[Reply]:
        """Every rank's reply to a step; a foreign exception becomes ``EngineError``."""
        began = time.monotonic()
        known = tokens <= self._most_tokens and patches <= self._most_patches
        limit = max(self._step_timeout, 2 * self._longest) if known else self._first_timeout
        deadline = began + limit
        replies = []
        for rank, future in enumerate(futures):
            try:
                replies.append(future.result(max(0.0, deadline - time.monotonic())))
            except RolloutError:
                raise
            except FutureTimeout as error:
                raise EngineBroken(
                    f"rank {rank} did not end a step within {limit:g} s; if steps may take so "
                    "long here, start the engine with a larger timeout"
                ) from error
            except Exception as error:
                text = f"a step failed on rank {rank}: {type(error).__name__}: {error}"
                raise EngineError(text) from error
        self._longest = max(self._longest, time.monotonic() - began)
        self._most_tokens = max(self._most_tokens, tokens)
        self._most_patches = max(self._most_patches, patches)
        return replies


def _settle(futures: list[Future[Reply]], error: RolloutError) -> None:
    """After one rank's ``error``: another rank's death explains it, one that hangs is worse."""
    ended = settled(futures, _SETTLE_WAIT)
    for future in futures:
        if future.done() and isinstance(death := future.exception(), WorkerDied):
            raise death from error
    if not ended:
        raise EngineBroken(f"one rank failed a step and another did not end it: {error}") from error
