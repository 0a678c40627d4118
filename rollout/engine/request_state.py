"""A request on its way: its samples, their text, and the call it came with."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from rollout.engine.sequence import Sequence
from rollout.engine.tokenizer import Detokenizer
from rollout.generation import NAN_LOGITS, Completion, Logprobs, Request, RequestOutput, VersionSpan


@dataclass(frozen=True, slots=True)
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
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a sink gets: cheap to make at every step, turned into an output by whoever takes it.

    Making one copies no list, so that a stream of n tokens costs the engine n, not n squared; a
    consumer that is behind takes the newest and drops those before it. ``output`` may be called in
    any thread: the lists of a sequence only grow, and a snapshot reads no further than its count.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, float] | None] | None
    num_scored: int  # entries of ``prompt_logprobs`` that were there
    samples: tuple[SampleSnapshot, ...]
    finished: bool
    num_cached_tokens: int
    epoch: int

    def output(self) -> RequestOutput:
        """Everything up to then, cumulative; its lists belong to the caller."""
        scored = self.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            prompt_logprobs=None if scored is None else scored[: self.num_scored],
            outputs=[sample.completion() for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            epoch=self.epoch,
        )


Sink = Callable[[Snapshot | BaseException], None]


class Call:
    """Requests submitted together; ``sink`` gets their outputs, or one error that ends them all."""

    __slots__ = ("open", "sink", "stream")

    def __init__(self, sink: Sink, stream: bool, request_ids: ReadOnly[str]) -> None:
        self.sink = sink
        self.stream = stream
        self.open = set(request_ids)


class Sample:
    """A sequence and its text. Without stop strings or a stream, text is made once, at the end."""

    __slots__ = ("last_time", "sequence", "stepwise", "text")

    def __init__(self, sequence: Sequence, text: Detokenizer | None, stepwise: bool) -> None:
        self.sequence = sequence
        self.text = text
        self.stepwise = stepwise and text is not None
        self.last_time = 0.0

    def judge(self, eos_ids: frozenset[int]) -> bool:
        """Look at the newest token: does it end the sample? Sets the finish and stop reasons."""
        seq, params = self.sequence, self.sequence.params
        token, count = seq.token_ids[-1], seq.output_len
        if token in seq.stop_ids and count >= params.min_tokens:
            by_eos = token in eos_ids and not params.ignore_eos
            self._end("stop", None if by_eos else token)
            return True
        if self.stepwise and self.text is not None:
            before = len(self.text.text)
            self.text.feed((token,))
            if params.stop and count >= params.min_tokens:
                stop = self.text.cut_at_stop(before)
                if stop is not None:
                    self._end("stop", stop)
                    return True
        if seq.num_tokens >= seq.max_len:
            self._end("length", None)
            return True
        return False

    def abort(self) -> None:
        self._end("abort", None)

    def end_for_nan(self) -> None:
        """Nothing can be drawn: the logits are no numbers."""
        self._end("error", None)
        self.sequence.stop_reason = NAN_LOGITS

    def snapshot(self) -> SampleSnapshot:
        seq = self.sequence
        finished = seq.finish_reason is not None
        return SampleSnapshot(
            seq,
            seq.output_len,
            self.text.visible(finished) if self.text is not None else "",
            seq.cumulative_logprob,
            seq.finish_reason,
            seq.stop_reason,
            seq.weight_versions.spans(),
            seq.kv_spans.spans(),
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
        self.text.feed(output[:-1] if hidden else output, final=True)


class RequestState:
    """One admitted request and its ``n`` samples."""

    __slots__ = ("arrived", "call", "first_token", "num_open", "request", "samples")

    def __init__(self, request: Request, samples: list[Sample], call: Call, arrived: float) -> None:
        self.request = request
        self.samples = samples
        self.call = call
        self.arrived = arrived
        self.first_token = 0.0
        self.num_open = len(samples)

    @property
    def sequences(self) -> list[Sequence]:
        return [sample.sequence for sample in self.samples]

    def snapshot(self, epoch: int) -> Snapshot:
        """Everything so far; copies no list."""
        first = self.samples[0].sequence
        scored = first.prompt_logprobs
        return Snapshot(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=scored,
            num_scored=len(scored or ()),
            samples=tuple(sample.snapshot() for sample in self.samples),
            finished=self.num_open == 0,
            num_cached_tokens=max(first.num_cached_tokens, 0),
            epoch=epoch,
        )
