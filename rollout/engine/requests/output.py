"""From a step's tokens to what callers see: requests in flight, and who hears of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from math import isnan

from torch import Tensor

from rollout.engine.adapters.commits import AdapterCommits
from rollout.engine.adapters.table import AdapterTable
from rollout.engine.loaded_model import LoadedModel
from rollout.engine.requests.drafted import in_turn
from rollout.engine.requests.journal import Finished, Journal
from rollout.engine.requests.request_state import Call, RequestState, Sample, Snapshot
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.sequences.sequence import ScheduledBatch, Sequence
from rollout.errors import EngineError
from rollout.generation.metrics import EngineCounters
from rollout.weights.adapters import AdapterVersion

log = logging.getLogger(__name__)


class OutputProcessor:
    """Owns the requests in flight; used by the engine's thread alone.

    Outputs are collected by ``step`` and ``abort`` and handed to the sinks by ``publish``, all of
    a step in one go.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        counters: EngineCounters,
        *,
        epoch: int,
        live_ids: set[str],
        journal: Journal | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._model = model
        self.requests: dict[str, RequestState] = {}
        self._scheduler = scheduler
        self._counters = counters
        self._epoch = epoch
        self._journal = journal
        self._adapters = adapters
        self._adapter_commits = AdapterCommits()
        self._live_ids = live_ids  # taken by submit, in other threads; given back here
        self._samples: dict[int, tuple[RequestState, Sample]] = {}
        self._changed: dict[str, RequestState] = {}
        self._nan_versions: dict[bool, int] = {}  # the last one with NaN, of itself or by masks
        self._booked = -1.0  # when the last step's tokens were

    def add(self, states: list[RequestState]) -> None:
        """Take over all requests of one call and queue their samples, in order."""
        for state in states:
            self.requests[state.request.request_id] = state
            self._counters.prompt_tokens += len(state.request.prompt_token_ids)
            running = [s for s in state.samples if s.sequence.finish_reason is None]
            for sample in running:
                self._samples[sample.sequence.seq_id] = (state, sample)
            self._scheduler.add([sample.sequence for sample in running])

    def step(self, batch: ScheduledBatch, output: SamplerOutput) -> None:
        """Book one computed step: KV first, then each new token and whether it is the last.

        Sequences that ended while the step was under way are passed over.
        """
        if batch.previous_rows is not None:
            batch, output = _of_the_running(batch, output)
        if output.drafts is not None:
            _book_drafts(batch, output.drafts.tolist())
        drafter = self._scheduler.drafter
        if drafter is not None and any(entry.drafts for entry in batch.entries):
            for part, its_output in in_turn(batch, output, self._judge):
                self._book(part, its_output)
            for entry in batch.entries:
                if entry.drafts:
                    self._scheduler.blocks.end_drafts(entry.sequence)
        else:
            self._book(batch, output)
        self._counters.steps += 1
        self._counters.pinned_steps += batch.version != self._scheduler.blocks.version

    def _book(self, batch: ScheduledBatch, output: SamplerOutput) -> None:
        drawing = batch.drawing
        if output.hidden is not None:
            self._book_hidden(batch, output.hidden)
        if len(output.processed) < len(output.tokens):
            self._book_scores(batch, output)
        _book_experts(batch, output)
        self._scheduler.advance(batch)
        self._end_answerless(batch)
        no_tokens = self._counters.nan_logits
        self._book_tokens(drawing, output, batch.version)
        self._counters.generation_tokens += len(drawing) - (self._counters.nan_logits - no_tokens)

    def _judge(self, seq: Sequence, drafted: int, accepted: int) -> None:
        counters, drafter = self._counters, self._scheduler.drafter
        counters.drafts += 1
        counters.draft_tokens += drafted
        counters.accepted_tokens += accepted
        if drafter is not None:
            drafter.judge(seq, drafted, accepted)

    def _book_tokens(self, drawing: list[Sequence], output: SamplerOutput, version: int) -> None:
        columns = (output.tokens, output.raw, output.processed, output.log_kept_mass)
        drawn = zip(*(column[: len(drawing)].tolist() for column in columns), strict=True)
        kept, samples = iter(output.kept()), self._samples
        now, before, followed = time.monotonic(), self._booked, 0
        for row, (seq, (token, raw, processed, mass)) in enumerate(
            zip(drawing, drawn, strict=True)
        ):
            left = None if seq.kept is None else next(kept)
            found = samples.get(seq.seq_id)
            if found is None:
                continue  # of a call that ended a moment ago, with another of its samples
            state, sample = found
            if isnan(raw + processed):  # neither is plus infinity
                self._end_for_nan(state, sample, version, masked=not isnan(raw))
                continue
            seq.append(token, version, raw, processed, mass)
            if seq.kept is not None and left is not None:
                seq.kept.append(left)
            if seq.top is not None:
                params = seq.params
                seq.top.append(output.top(row, params.logprobs or 0, params.top_logprobs_mode))
            if sample.last_time == before:
                followed += 1
            else:
                self._observe(state, sample, now)
            sample.last_time = now
            try:
                ended = sample.check_stop(self._model.eos_ids)
            except Exception as error:  # its text, most likely; the others' tokens are good
                log.exception("request %r cannot go on", seq.request_id)
                self._fail_for_text(state, error)
                continue
            if ended:
                self._close(state, sample)
            elif state.call.stream and sample.is_due:
                self._changed[state.request.request_id] = state
        if followed:
            self._counters.inter_token.observe(now - before, followed)
        self._booked = now

    def complete(self, seq: Sequence) -> None:
        """End a sample whose grammar has come to its end."""
        state, sample = self._samples[seq.seq_id]
        sample.complete()
        self._close(state, sample)

    def end_stale(
        self,
        version: int,
        default: int | None,
        on_stale: str,
        adapters: Collection[str] | None = None,
    ) -> set[int]:
        """Before ``version`` goes live: judge every sample by how far that leaves it behind.

        ``default`` and ``on_stale``: the bound and the policy of requests that bring none.
        ``adapters``: those that alone have changed, and are what they are now; None: the models.
        Returns the ``seq_id`` of those whose KV will be computed again, by ``version``.
        """
        again: set[int] = set()
        for state, sample in list(self._samples.values()):
            seq, params = sample.sequence, sample.sequence.params
            most = default if params.max_staleness is None else params.max_staleness
            if adapters is not None and (seq.adapter is None or seq.adapter.name not in adapters):
                continue
            if most is None or self._staleness(seq, version) <= most:
                continue
            policy = params.on_stale or on_stale
            self._counters.stale[policy] += 1
            if policy == "recompute":
                seq.adapter = self.newest(seq)
                self._scheduler.unpin([seq])
                self._scheduler.recompute([seq])
                again.add(seq.seq_id)
            else:
                sample.end_for_staleness(policy)
                self._close(state, sample, version)
        self._adapter_commits.note(version, adapters)
        return again

    def end_stale_begun(
        self, states: Iterable[RequestState], default: int | None, on_stale: str
    ) -> None:
        """Judge what other engines have begun, as the commits since then would have here.

        All of its KV is computed by the live weights: what "recompute" asks for.
        """
        for state in states:
            for sample in state.samples:
                seq, params = sample.sequence, sample.sequence.params
                most = default if params.max_staleness is None else params.max_staleness
                if seq.finish_reason is None and most is not None and self._staleness(seq) > most:
                    policy = params.on_stale or on_stale
                    self._counters.stale[policy] += 1
                    if policy != "recompute":
                        sample.end_for_staleness(policy)
                        self._close(state, sample)

    def newest(self, seq: Sequence) -> AdapterVersion | None:
        """What its adapter is now; what it was where that has been unloaded."""
        if seq.adapter is None or self._adapters is None:
            return seq.adapter
        return self._adapters.newest(seq.adapter.name) or seq.adapter

    def abort(self, request_ids: Iterable[str]) -> int:
        """End requests with what they have; returns how many were still running."""
        count = 0
        for request_id in list(request_ids):
            state = self.requests.get(request_id)
            if state is None:
                continue
            count += 1
            for sample in state.samples:
                if sample.sequence.finish_reason is None:
                    sample.abort()
                    self._close(state, sample)
        return count

    def fail(self, error: BaseException, request_ids: Iterable[str] | None = None) -> None:
        """End these requests' calls (or all calls) with ``error``; their other requests too."""
        ids = self.requests if request_ids is None else request_ids
        calls = {id(c): c for c in (self.requests[i].call for i in ids if i in self.requests)}
        for call in calls.values():
            self._drop(call)
            _deliver(call, error)

    def refuse(self, call: Call, error: BaseException) -> None:
        """End a call, whether or not it was taken over."""
        self._drop(call)
        _deliver(call, error)

    def publish(self) -> None:
        """Hand every changed request to its sink; a sink that raises loses its call."""
        changed, self._changed = self._changed, {}
        for state in changed.values():
            if state.request.request_id not in state.call.open:
                continue  # of a call that another of its requests has ended
            try:
                snapshot = state.snapshot(
                    self._epoch, self._staleness, self._model.sparse_layers, self._model.labels
                )
            except Exception as error:  # its text, as above
                log.exception("request %r cannot go on", state.request.request_id)
                self._fail_for_text(state, error)
                continue
            if snapshot.finished:
                state.call.open.discard(snapshot.request_id)
                self._live_ids.discard(snapshot.request_id)
                self._note(state, snapshot)
            if not _deliver(state.call, snapshot):
                self._drop(state.call)

    def _note(self, state: RequestState, snapshot: Snapshot) -> None:
        if self._journal is None:
            return
        request, seeds = state.request, tuple(seq.seed for seq in state.sequences)
        self._journal.add(Finished(snapshot, request.params, seeds, len(request.visuals)))

    def _book_hidden(self, batch: ScheduledBatch, hidden: Tensor) -> None:
        states, first = hidden.numpy(), 0
        for entry in batch.entries:
            if stop := entry.num_hidden:
                last = entry.stop >= entry.sequence.prompt_len
                entry.sequence.take_hidden(states[first : first + stop], last)
                first += stop

    def _book_scores(self, batch: ScheduledBatch, output: SamplerOutput) -> None:
        first = len(output.processed)
        for entry in batch.entries:
            stop, seq = first + len(entry.prompt_rows), entry.sequence
            if stop > first and seq.scores is not None:
                seq.scores.add(output, first, stop)
            first = stop

    def _end_answerless(self, batch: ScheduledBatch) -> None:
        """End the samples of prompts that are computed, and have no answer."""
        for entry in batch.entries:
            seq = entry.sequence
            if seq.draws or seq.num_computed < seq.num_tokens or seq.seq_id not in self._samples:
                continue
            state, sample = self._samples[seq.seq_id]
            if seq.scores is not None and seq.scores.is_nan:
                self._end_for_nan(state, sample, batch.version)
                continue
            sample.end_answerless()
            self._close(state, sample)

    def _end_for_nan(
        self, state: RequestState, sample: Sample, version: int, masked: bool = False
    ) -> None:
        """``masked``: the model's own logits are numbers, and its settings have left none."""
        name = sample.sequence.request_id
        if self._nan_versions.get(masked) != version:  # one line of a version, not of each sample
            self._nan_versions[masked] = version
            if masked:
                log.warning(
                    "request %r: its allowed_token_ids, bad_words, min_tokens and "
                    "structured_outputs leave no token to draw; such samples end with "
                    'finish_reason "error"',
                    name,
                )
            else:
                log.error(
                    "request %r: its logits are NaN under weight version %d; such samples end with "
                    'finish_reason "error"',
                    name,
                    version,
                )
        self._counters.nan_logits += 1
        sample.end_for_nan()
        self._close(state, sample)

    def _observe(self, state: RequestState, sample: Sample, now: float) -> None:
        if sample.last_time:
            self._counters.inter_token.observe(now - sample.last_time)
        elif not state.first_token:
            state.first_token = now
            self._counters.time_to_first_token.observe(now - state.arrived)

    def _close(self, state: RequestState, sample: Sample, live: int | None = None) -> None:
        """One sample has ended; the request with its last one.

        ``live``: the version that is about to be, at a commit.
        """
        seq: Sequence = sample.sequence
        self._scheduler.finish(seq)
        del self._samples[seq.seq_id]
        assert seq.finish_reason is not None
        self._counters.finished[seq.finish_reason] += 1
        self._counters.staleness.observe(self._staleness(seq, live))
        state.num_open -= 1
        if state.num_open == 0:
            del self.requests[state.request.request_id]
        if state.num_open == 0 or state.call.stream:
            self._changed[state.request.request_id] = state

    def _staleness(self, seq: Sequence, live: int | None = None) -> int:
        """Behind ``live``; None: behind the version that it would be computed by, if it began
        now.
        """
        live = self._version_for(seq) if live is None else live
        return self._adapter_commits.staleness(seq, live)

    def _version_for(self, seq: Sequence) -> int:
        """The version that it would be computed by, if it began now."""
        newest = self.newest(seq)
        base = self._scheduler.blocks.version
        return base if newest is None else max(base, newest.version)

    def _fail_for_text(self, state: RequestState, error: Exception) -> None:
        name = state.request.request_id
        text = f"request {name!r} failed: {type(error).__name__}: {error}"
        self.refuse(state.call, EngineError(text))

    def _drop(self, call: Call) -> None:
        for request_id in call.open:
            self._changed.pop(request_id, None)
            state = self.requests.pop(request_id, None)
            for sample in state.samples if state else ():
                if self._samples.pop(sample.sequence.seq_id, None):
                    self._scheduler.finish(sample.sequence)
                    self._counters.finished["error"] += 1
        self._live_ids.difference_update(call.open)
        call.open.clear()


def _of_the_running(
    batch: ScheduledBatch, output: SamplerOutput
) -> tuple[ScheduledBatch, SamplerOutput]:
    """A step begun ahead, all of whose entries draw a token, without those that have ended."""
    rows = batch.rows_running
    if len(rows) == len(batch.entries):
        return batch, output
    entries = batch.entries
    wanting = [row for row, e in enumerate(entries) if e.sequence.experts is not None]
    asking = [row for row, e in enumerate(entries) if e.sequence.kept is not None]
    left = output.pick(
        rows,
        experts=[place for place, row in enumerate(wanting) if row in rows],  # one of each
        kept=[index for index, row in enumerate(asking) if row in rows],
    )
    return replace(batch, entries=[entries[row] for row in rows]), left


def _book_drafts(batch: ScheduledBatch, tokens: list[int]) -> None:
    """What the draft model drew in the step, which the ranks alone knew until now."""
    start = 0
    for entry in batch.entries:
        if entry.drafts and entry.draft_context:
            stop = start + len(entry.drafts)
            entry.drafts, start = tuple(tokens[start:stop]), stop
    assert start == len(tokens), "drafts of other places than were asked for"


def _book_experts(batch: ScheduledBatch, output: SamplerOutput) -> None:
    """To each sequence that wants them what its tokens were routed to; before it goes on."""
    if output.experts is None:
        return
    rows, start = output.experts.numpy(), 0
    for entry in batch.entries:
        if entry.sequence.experts is not None:
            count = len(entry.expert_positions)
            entry.sequence.experts.append(rows[start : start + count])
            start += count
    assert start == len(rows), "experts of other places than were asked for"


def _deliver(call: Call, item: Snapshot | BaseException) -> bool:
    try:
        call.sink(item)
    except Exception:
        log.exception("the sink of a generate call raised; the call is dropped")
        return False
    return True
