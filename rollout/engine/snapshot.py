"""A request's output at one step, before anybody has taken it."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.engine.sequence import Sequence
from rollout.generation import Completion, Logprobs, RequestOutput, VersionSpan


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
