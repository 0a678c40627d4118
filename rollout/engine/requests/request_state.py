"""Requests on their way, their samples, and the snapshots that callers see of them."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from rollout.engine.sequences.score_builder import ScoreBuilder
from rollout.engine.sequences.sequence import Sequence
from rollout.engine.tokenizer import Detokenizer
from rollout.generation import (
    MAX_STALENESS,
    NAN_LOGITS,
    Completion,
    Labels,
    Logprobs,
    Request,
    RequestOutput,
    SamplingMask,
    VersionSpan,
)


@dataclass(slots=True)  # not frozen: it is made at every step, and that takes thrice as long
class SampleSnapshot:
    """One sample as it stands after ``count`` tokens; what only grows is not copied."""

    sequence: Sequence
    count: int
    text: str
    cumulative_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: tuple[VersionSpan, ...]
    kv_spans: tuple[VersionSpan, ...]
    staleness: int
    adapter: str

    def completion(self) -> Completion:
        seq, count = self.sequence, self.count
        return Completion(
            index=seq.index,
            text=self.text,
            token_ids=seq.token_ids[seq.prompt_len : seq.prompt_len + count],
            logprobs=Logprobs(
                seq.raw[:count],
                seq.processed[:count],
                seq.log_kept_mass[:count],
                None if seq.top is None else seq.top[:count],
            ),
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=self.weight_versions,
            kv_spans=self.kv_spans,
            staleness=self.staleness,
            routed_experts=self._experts(),
            sampling_mask=None if seq.kept is None else SamplingMask.of(seq.kept[:count]),
            adapter=self.adapter,
        )

    def _experts(self) -> NDArray[Any] | None:
        seq = self.sequence
        if seq.experts is None:
            return None
        known = seq.prompt_len + self.count + (seq.target is not None)
        return seq.experts.array(known - 1)  # not of the last token


@dataclass(slots=True)
class Snapshot:
    """What a sink gets: cheap to make at every step, turned into an output by whoever takes it.

    Making one copies no list, so that a stream of n tokens costs the engine n, not n squared; a
    consumer that is behind takes the newest and drops those before it. ``output`` may be called in
    any thread: the lists of a sequence only grow, and a snapshot reads no further than its count.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    scores: ScoreBuilder | None
    num_scored: int  # entries of ``scores`` that were there
    samples: tuple[SampleSnapshot, ...]
    finished: bool
    num_cached_tokens: int
    epoch: int
    hidden_state: list[float] | None
    answered: bool  # whether tokens follow the prompt
    sparse_layers: tuple[bool, ...]
    labels: Labels | None

    def output(self) -> RequestOutput:
        """Everything up to then, cumulative; its lists belong to the caller."""
        hidden, ids = self.hidden_state, list(self.prompt_token_ids)
        scores = None if self.scores is None else self.scores.packed(self.num_scored)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=ids,
            prompt_logprobs=scores.rows(ids) if scores is not None and self.answered else None,
            outputs=[sample.completion() for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            epoch=self.epoch,
            hidden_state=None if hidden is None else list(hidden),
            scores=None if self.answered else scores,
            sparse_layers=self.sparse_layers,
            labels=self.labels,
        )


Sink = Callable[[Snapshot | BaseException], None]


@dataclass(slots=True, eq=False)
class Call:
    """Requests submitted together; ``sink`` gets their outputs, or one error that ends them all.

    ``open``: the ids of those that have not ended. ``aborted``: of those that are to end as they
    are admitted; other threads may still add to it.
    """

    sink: Sink
    stream: bool
    open: set[str]
    aborted: Set[str] = frozenset()


@dataclass(slots=True, eq=False)
class Sample:
    """A sequence and its text. Without stop strings or a stream of every token (``stepwise``), text
    is made at the end, of all tokens, and before it of those that an output tells.
    """

    sequence: Sequence
    text: Detokenizer | None
    stepwise: bool
    last_time: float = 0.0
    told: int = 0  # tokens of the last output

    @property
    def is_due(self) -> bool:
        """Whether a stream is to have its newest token now: the first, or an interval's last."""
        more = self.sequence.output_len - self.told
        return not self.told or more >= self.sequence.params.stream_interval

    def check_stop(self, eos_ids: frozenset[int]) -> bool:
        """Look at the newest token: does it end the sample? Sets the finish and stop reasons."""
        seq = self.sequence
        token = seq.token_ids[-1]
        if token in seq.stop_ids and seq.output_len >= seq.params.min_tokens:
            params = seq.params
            asked = params.ignore_eos and token in params.stop_token_ids
            by_eos = token in eos_ids and not asked
            self._end("stop", None if by_eos else token)
            return True
        if self.stepwise and self.text is not None:
            before = len(self.text.text)
            self.text.feed((token,))
            if seq.params.stop and seq.output_len >= seq.params.min_tokens:
                stop = self.text.cut_at_stop(before)
                if stop is not None:
                    self._end("stop", stop)
                    return True
        if len(seq.token_ids) >= seq.max_len:
            self._end("length", None)
            return True
        return False

    def go_on(self, delivered: Completion) -> None:
        """Have what another engine has delivered of this sample; the KV of it is computed here."""
        seq, logs = self.sequence, delivered.logprobs
        seq.own_tokens()
        adapter, seq.adapter = seq.adapter, None  # maybe newer than what made those tokens
        columns = (delivered.token_ids, logs.raw, logs.processed, logs.log_kept_mass)
        spans = (span for span in delivered.weight_versions for _ in range(span.start, span.stop))
        for token, raw, processed, mass, span in zip(*columns, spans, strict=True):
            seq.append(token, span.version, raw, processed, mass)
        seq.adapter, seq.answered_by = adapter, delivered.adapter if seq.output_len else ""
        if seq.top is not None:
            seq.top += logs.top or []
        if seq.kept is not None and delivered.sampling_mask is not None:
            seq.kept += delivered.sampling_mask.rows()
        seq.finish_reason, seq.stop_reason = delivered.finish_reason, delivered.stop_reason
        self.told = seq.output_len
        if self.text is not None:
            self.text.feed(delivered.token_ids, final=seq.finish_reason is not None)

    def abort(self) -> None:
        self._end("abort", None)

    def complete(self) -> None:
        """Nothing may follow; its last token is text, unlike one that stops."""
        if self.text is not None and self.stepwise:
            self.text.feed((), final=True)
        elif self.text is not None:
            self.text.make(self.sequence.output_token_ids)
        self.sequence.finish_reason = "stop"

    def end_answerless(self) -> None:
        """No token was wanted: its prompt is computed."""
        self._end("length", None)

    def end_for_nan(self) -> None:
        """Nothing can be drawn: the logits are no numbers."""
        self._end("error", None)
        self.sequence.stop_reason = NAN_LOGITS

    def end_for_staleness(self, policy: str) -> None:
        """Its oldest token lies too far behind: "finish" with what it has, or "abort"."""
        self._end("length" if policy == "finish" else "abort", None)
        self.sequence.stop_reason = MAX_STALENESS

    def snapshot(self, staleness: Callable[[Sequence], int]) -> SampleSnapshot:
        """``staleness``: of a sequence, as of now."""
        seq = self.sequence
        finished = seq.finish_reason is not None
        if self.text is not None and not (finished or self.stepwise):
            self.text.feed(seq.token_ids[seq.prompt_len + self.told :])
        self.told = seq.output_len
        return SampleSnapshot(
            seq,
            seq.output_len,
            self.text.visible(finished) if self.text is not None else "",
            seq.cumulative_logprob,
            seq.finish_reason,
            seq.stop_reason,
            seq.weight_versions.spans(),
            seq.stamped_kv_spans(),
            staleness(seq),
            seq.answered_by or seq.adapter_name,
        )

    def _end(self, reason: str, stop: int | str | None) -> None:
        seq = self.sequence
        seq.finish_reason, seq.stop_reason = reason, stop
        if self.text is None or isinstance(stop, str):
            return
        hidden = reason == "stop" and not seq.params.include_stop_str_in_output
        if self.stepwise:
            self.text.feed(
                seq.token_ids[-1:] if reason == "stop" and not hidden else (), final=True
            )
            return
        output = seq.output_token_ids
        self.text.make(output[:-1] if hidden else output)


@dataclass(slots=True, eq=False)
class RequestState:
    """One admitted request and its ``n`` samples."""

    request: Request
    samples: list[Sample]
    call: Call
    arrived: float
    first_token: float = 0.0
    num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = sum(sample.sequence.finish_reason is None for sample in self.samples)

    @property
    def sequences(self) -> list[Sequence]:
        return [sample.sequence for sample in self.samples]

    def snapshot(
        self,
        epoch: int,
        staleness: Callable[[Sequence], int],
        sparse_layers: tuple[bool, ...],
        labels: Labels | None,
    ) -> Snapshot:
        """Everything so far; copies no list."""
        first = self.samples[0].sequence
        scores = first.scores
        return Snapshot(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            scores=scores,
            num_scored=0 if scores is None else scores.length,
            samples=tuple(sample.snapshot(staleness) for sample in self.samples),
            finished=self.num_open == 0,
            num_cached_tokens=max(first.num_cached_tokens, 0),
            epoch=epoch,
            hidden_state=first.hidden_state,
            answered=first.draws,
            sparse_layers=() if first.experts is None else sparse_layers,
            labels=labels,
        )
