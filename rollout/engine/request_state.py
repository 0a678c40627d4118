"""A request on its way: its samples, their text, and the call it came with."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly

from rollout.engine.detokenizer import Detokenizer
from rollout.engine.sequence import Sequence
from rollout.engine.snapshot import SampleSnapshot, Snapshot
from rollout.generation import NAN_LOGITS, Request

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
