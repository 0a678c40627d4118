"""The calls that an engine in this process works on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence

from rollout.api.coming_call import ComingCall
from rollout.api.output_collector import Mailbox, RequestOutputCollector
from rollout.engine.core import EngineCore
from rollout.errors import EngineError, InvalidRequest, RolloutError, VersionConflict
from rollout.generation import Completion, PlacedVisual, Request, RequestOutput, SamplingParams

_LOOK = 0.005  # seconds between looks at what is live


class RunningCalls:
    """Hands calls to the engine and their outputs to the loop that asked. ``ids``: of requests that
    the engine has.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.ids: set[str] = set()
        self._coming: set[ComingCall] = set()
        self._mailbox: Mailbox | None = None  # of the loop that asked last

    @property
    def num_coming(self) -> int:
        """Sequences of calls that the engine has not got yet."""
        return sum(call.num_sequences for call in list(self._coming))

    @contextlib.contextmanager
    def coming(
        self, request_ids: Sequence[str], params: Sequence[SamplingParams]
    ) -> Iterator[ComingCall]:
        """From a call's arrival on: what it is aborted by until the engine has it."""
        call = ComingCall(request_ids, sum(one.n for one in params))
        self._coming.add(call)
        try:
            yield call
        finally:
            self._coming.discard(call)

    def abort_coming(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests, or all, where the engine has not got them yet; how many there were.

        Who then asks the engine for the same ends those that it has got meanwhile.
        """
        return sum(call.abort(request_ids) for call in list(self._coming))

    async def run(
        self,
        call: ComingCall,
        prompt_ids: Sequence[Sequence[int]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        stream: bool,
        visuals: Sequence[tuple[PlacedVisual, ...]],
        delivered: Sequence[tuple[Completion, ...]] | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """One call: (index of its request, output), of all or, with ``stream``, as tokens come.

        ``visuals`` and ``delivered`` (what was answered of samples that go on) are one each. A
        reader that leaves early aborts what is left. What is aborted before the engine has it ends
        there without a step.
        """
        begun = delivered or [()] * len(params)
        rows = zip(request_ids, prompt_ids, params, texts, visuals, begun, strict=True)
        requests = [
            Request(
                request_id=i, prompt_token_ids=tuple(ids), params=p, prompt=text, visuals=own,
                delivered=done,
            )
            for i, ids, p, text, own, done in rows
        ]  # fmt: skip
        index = {request.request_id: n for n, request in enumerate(requests)}
        if len(index) < len(requests):
            raise InvalidRequest("request ids must differ within one call")
        await self._compile(params, call)
        for one in params:
            one.check_epoch(self.core.epoch)
        await self._has_come(max((p.min_version or 0 for p in params), default=0), call)
        if any(p.bad_words for p in params):
            requests = await asyncio.to_thread(self.core.inputs.with_bad_words, requests)
        if self._mailbox is None or self._mailbox.loop is not asyncio.get_running_loop():
            self._mailbox = Mailbox()
        collector = RequestOutputCollector(self._mailbox)
        self.core.submit(requests, collector, stream=stream, aborted=call.aborted)
        self._coming.discard(call)
        pending = set(index)
        self.ids |= pending
        try:
            while pending:
                try:
                    item = await collector.take()
                except RolloutError:  # it ended the whole call
                    pending.clear()
                    raise
                if item.finished:
                    pending.discard(item.request_id)
                yield index[item.request_id], item.output()
        finally:
            self.ids.difference_update(index)
            if pending:
                # Asked for without waiting: a cancelled reader may not be able to await any more.
                with contextlib.suppress(EngineError):  # a dead engine has nothing left to abort
                    self.core.at_step_boundary(lambda: self.core.outputs.abort(pending))

    async def _has_come(self, version: int, call: ComingCall) -> None:
        """Wait until ``version`` is live; ``VersionConflict`` at the engine's timeout."""
        deadline = time.monotonic() + self.core.config.timeout
        while self.core.version < version and not call.is_over:
            if time.monotonic() > deadline:
                alone = self.core.serving.left is None  # a fleet's epoch is not its members'
                epoch = f"epoch {self.core.epoch}" if alone else "the fleet's epoch"
                raise VersionConflict(
                    f"version {version} was asked for and did not become live within "
                    f"{self.core.config.timeout:g} s: version {self.core.version} is (of {epoch}, "
                    "whose versions count by themselves); ask for that or less, or update the "
                    "weights"
                )
            if self.core.state in ("dead", "closed"):
                return  # who submits hears why
            await asyncio.sleep(_LOOK)

    async def _compile(self, params: Sequence[SamplingParams], call: ComingCall) -> None:
        """Wait, off the engine's thread, until every grammar of a call is known to be one."""
        grammars = self.core.grammars
        specs = {id(p): p.structured_outputs for p in params if p.structured_outputs is not None}
        for spec in specs.values():
            if spec is not None and grammars is not None and not call.is_over:
                await call.until(grammars.compile(spec))
