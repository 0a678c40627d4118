"""What is asked of a running engine beside requests: abort, pause, sleep, caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout.config import check_timeout
from rollout.engine.deadline_future import DeadlineFuture
from rollout.engine.executors import gather_replies
from rollout.engine.loop import StepLoop
from rollout.engine.pins import Pins
from rollout.engine.requests.output import OutputProcessor
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.errors import EngineBroken, InvalidRequest, RolloutError
from rollout.wire.frames import Reply

T = TypeVar("T")
WAKE_TAGS = ("weights", "kv_cache")
ASLEEP = "the engine is asleep; call wake_up first"
PAUSE_MODES = ("keep", "recompute", "wait", "abort")
SLEEP_MODES = ("keep", "wait", "abort")


class Control:
    """Each verb returns at once; what it returns is waited for, in a thread or a task.

    ``timeout``: seconds, at most ``MAX_TIMEOUT``; None is ``default_timeout``. ``call`` asks every
    rank. ``broken``: why the engine cannot generate until a full update commits, if so.
    """

    def __init__(
        self,
        loop: StepLoop,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        pins: Pins,
        call: Callable[[str, Mapping[str, Any]], list[Future[Reply]]],
        default_timeout: float,
    ) -> None:
        self.asleep: set[str] = set()  # tags that were given up
        self.parked = False  # a sleep has moved the weights from a device to host memory
        self.broken: str | None = None
        self._loop, self._scheduler, self._outputs = loop, scheduler, outputs
        self._pins, self._call, self._timeout = pins, call, default_timeout

    def abort(
        self, request_ids: Iterable[str], timeout: float | None = None
    ) -> DeadlineFuture[int]:
        """End requests with ``finish_reason`` "abort" and what they have; how many there were."""
        ids = list(request_ids)
        return self._ask("abort", lambda: self._outputs.abort(ids), timeout)

    def pause(self, mode: str = "keep", timeout: float | None = None) -> DeadlineFuture[None]:
        """Stop generating until ``resume``.

        "keep" freezes what runs, "recompute" also takes its KV, which is computed again after
        ``resume``, "wait" lets what has begun finish first (``DeadlineExceeded`` when it does not,
        and generation goes on), "abort" ends everything.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(
                f"pause mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}"
            )
        if mode == "wait":
            return self._loop.ask_drained("pause", self._limit(timeout))

        def freeze() -> None:
            self._loop.pause_state.freeze("pause")
            if mode == "abort":
                self._outputs.abort(list(self._outputs.requests))
            if mode == "recompute":
                self._drop_cache(True)

        return self._ask("pause", freeze, timeout)

    def resume(self, timeout: float | None = None) -> DeadlineFuture[None]:
        return self._ask("resume", lambda: self._loop.pause_state.open("pause"), timeout)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> DeadlineFuture[None]:
        """``reset_running_requests``: what runs computes its KV again, paused or not."""
        return self._ask(
            "reset_prefix_cache", lambda: self._drop_cache(reset_running_requests), None
        )

    def finish_before_sleep(self, timeout: float) -> DeadlineFuture[None]:
        """Mode "wait" of a sleep, in front of it: let what has begun finish, and admit nothing
        until ``wake_up`` or ``stay_awake``; ``DeadlineExceeded`` when it does not.
        """
        return self._loop.ask_drained("sleep", timeout)

    def stay_awake(self) -> None:
        """After ``finish_before_sleep``, where no sleep followed; never waits and never raises."""
        self._loop.at_boundary(
            lambda: None if self.asleep else self._loop.pause_state.open("sleep")
        )

    def sleep(
        self, level: int = 1, mode: str = "keep", timeout: float | None = None
    ) -> DeadlineFuture[None]:
        """Free device memory: 1 keeps the weights in host memory, 2 drops them.

        What runs is frozen and computed again after ``wake_up`` or, with the mode "abort", ends;
        new calls get ``EngineClosed``. Asleep already, or woken in part, it gives up what is not
        given up yet.
        """
        if level not in (1, 2):
            raise InvalidRequest(f"sleep level must be 1 or 2, got {level!r}")
        if mode not in SLEEP_MODES:
            known = ", ".join(SLEEP_MODES)
            raise InvalidRequest(f"sleep mode must be one of {known}, got {mode!r:.80}")
        wait = self._limit(timeout)

        def fall_asleep() -> None:
            self._loop.pause_state.freeze("sleep")
            if mode == "abort":
                self._outputs.abort(list(self._outputs.requests))
            self._pins.end("before a sleep")
            self._drop_cache(True)
            self.asleep = set(WAKE_TAGS)
            if level == 2:  # what is frozen stays so until new weights are there
                self.broken = "sleep(level=2) dropped the weights"
                self._loop.pause_state.freeze("broken")
            replies = self._ask_or_break("sleep", {"level": level}, wait)
            self.parked = any(reply.get("parked") for reply, _ in replies)

        return self._ask("sleep", fall_asleep, wait)

    def wake_up(
        self, tags: Sequence[str] | None = None, timeout: float | None = None
    ) -> DeadlineFuture[None]:
        """Bring back "weights", "kv_cache" or both (None); serves again once both are there.

        After ``sleep(2)`` the engine stays broken until a full update commits.
        """
        wanted = list(WAKE_TAGS if tags is None else tags)
        if unknown := [tag for tag in wanted if tag not in WAKE_TAGS]:
            raise InvalidRequest(f"unknown tag {unknown[0]!r}; known: {', '.join(WAKE_TAGS)}")
        wait = self._limit(timeout)

        def wake() -> None:
            missing = [tag for tag in wanted if tag in self.asleep]
            if missing:
                self._ask_or_break("wake_up", {"tags": missing}, wait)
            self.asleep.difference_update(missing)
            self.parked = self.parked and "weights" in self.asleep
            if not self.asleep:
                self._loop.pause_state.open("sleep")

        return self._ask("wake_up", wake, wait)

    def mark_broken(self, reason: str | None) -> None:
        """Refuse generation with ``EngineBroken`` and end what is pending; None mends it."""
        was, self.broken = self.broken, reason
        if reason is not None:
            error = EngineBroken(self.broken_text)
            self._loop.at_boundary(lambda: self._outputs.fail(error))
        elif was is not None:
            self._loop.at_boundary(lambda: self._loop.pause_state.open("broken"))

    # ---- what an update holds back ----

    def drain(self, timeout: float) -> None:
        """Return when nothing that has begun is left; nothing is admitted until ``undrain``."""
        self._loop.ask_drained("drain", timeout).result()

    def undrain(self) -> None:
        """Admit again, from the next boundary on; never waits and never raises."""
        self._loop.at_boundary(lambda: self._loop.pause_state.open("drain"))

    def hold(self, timeout: float) -> None:
        """Stop stepping at the next boundary, until ``release``; independent of ``pause``."""
        self._loop.ask("hold", lambda: self._loop.pause_state.freeze("hold"), timeout).result()

    def release(self) -> None:
        """Step again, from the next boundary on; never waits and never raises."""
        self._loop.at_boundary(lambda: self._loop.pause_state.open("hold"))

    @property
    def broken_text(self) -> str:
        return f"the engine cannot generate until a full update commits: {self.broken}"

    def _drop_cache(self, running: bool) -> None:
        if running:
            self._scheduler.recompute()
        self._scheduler.blocks.reset_prefix_cache()

    def _ask(self, what: str, fn: Callable[[], T], timeout: float | None) -> DeadlineFuture[T]:
        return self._loop.ask(what, fn, self._limit(timeout))

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)

    def _ask_or_break(self, method: str, args: Mapping[str, Any], timeout: float) -> list[Reply]:
        """Ask all ranks, whose state nobody knows when one fails."""
        try:
            return gather_replies(self._call(method, args), method, timeout)
        except RolloutError as error:
            self.mark_broken(f"{method} failed: {error}")
            raise
