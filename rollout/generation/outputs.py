"""What comes back of a generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from numpy.typing import NDArray

from rollout.generation.labels import Labels
from rollout.generation.packed_scores import PackedScores
from rollout.generation.sampling_mask import SamplingMask

NAN_LOGITS = "nan_logits"  # the stop_reason of a sample that ended with "error"
MAX_STALENESS = "max_staleness"  # the stop_reason of a sample that ended for its age


# An output is made for each token of a stream: it is not frozen, which would take thrice as long.


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Positions ``start <= i < stop`` were computed by the weights of ``version``."""

    version: int
    start: int
    stop: int


@dataclass(slots=True)
class Logprobs:
    """Per output token, float32 natural logarithms.

    ``raw``: log-softmax of the model's logits. ``processed``: of the distribution that was sampled
    (renormalised over the kept tokens); of a greedy request at temperature 1, so ``raw`` where no
    penalty, bias or mask applies. ``log_kept_mass``: log of the tempered probability mass
    that the filters kept, so ``processed = log_softmax(logits / T) - log_kept_mass`` where no
    penalty or bias applies. ``top``: for each position the ``logprobs`` most likely tokens, by raw
    logprob unless ``top_logprobs_mode`` says otherwise, and the sampled one; None when not asked
    for.
    """

    raw: list[float]
    processed: list[float]
    log_kept_mass: list[float]
    top: list[dict[int, float]] | None = None

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(
            f"Logprobs are columns: .raw[{index!r}] and .processed[{index!r}] of that "
            "token, .top of it by token id where logprobs=k was asked for"
        )


CUT_SHORT = ("abort", "error")  # reasons to finish that neither the model nor a limit gave


@dataclass(slots=True, kw_only=True)
class Completion:
    """One sample. ``token_ids`` keep a stop token or string that ``text`` leaves out.

    ``finish_reason``: None while running, "stop" (``stop_reason`` None for the end-of-sequence
    token, an int for a stop id, a str for a stop string), "length" (``stop_reason``
    "max_staleness" where its ``max_staleness`` ended it), or one of two that leave the sample cut
    short, so that whoever scores it must look: "abort" (``abort``, a pause with mode="abort", an
    update with in_flight="abort", or ``max_staleness`` again) and "error" with ``stop_reason``
    "nan_logits" (the weights, or this request's settings, gave logits that are not numbers; the
    tokens up to there are good).
    ``weight_versions``: spans over output tokens, the weights whose forward gave the logits.
    ``kv_spans``: spans over all positions (prompt and output), the weights that computed the KV; of
    a sample that was preempted, or whose KV was computed again for another reason, the last time:
    tokens before that were drawn from KV that may have been of an older version.
    ``staleness``: how many versions its oldest token was behind the live one when this was made.
    ``routed_experts``: where asked for, [tokens, layers with experts, experts of a token] of uint8
    (int16 above 256 experts), of the prompt and then the output, from position
    ``routed_experts_prompt_start`` on. No row for the last token, which nothing was computed of.
    ``sampling_mask``: where asked for, which tokens each was drawn from. ``==`` compares neither.
    ``adapter``: what answered beside the base, ``name@version`` (of its newest token, where several
    versions did); "" where nothing did. The version of a token is that of the newest commit that
    changed the base or its adapter.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs
    cumulative_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: tuple[VersionSpan, ...]
    kv_spans: tuple[VersionSpan, ...]
    staleness: int = 0
    routed_experts: NDArray[Any] | None = field(default=None, compare=False)
    sampling_mask: SamplingMask | None = field(default=None, compare=False)
    adapter: str = ""

    @property
    def is_cut_short(self) -> bool:
        """Whether it ended by an abort or an error: no whole sample of the model."""
        return self.finish_reason in CUT_SHORT


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and all its samples so far; ``epoch`` says in which engine life versions count.

    ``prompt_logprobs``: None, or one entry per prompt token: None for the first, then the raw
    logprobs of that token and of the most likely ones, and None for those before
    ``prompt_logprobs_start``. ``scores``: the same of a request with max_tokens=0, in its place.
    ``hidden_state``: None, or what the model's last norm gave for the prompt's last token, [hidden
    size] float32, by the weights that computed its KV; with pooling "all" of one after the other.
    With pooling "classify" [labels], what a score head made of that; ``labels`` says of what.
    ``sparse_layers``: of a mixture, for each layer of the model, whether it has experts; where
    ``routed_experts`` were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[Completion]
    finished: bool
    num_cached_tokens: int
    epoch: int = 0
    hidden_state: list[float] | None = None
    scores: PackedScores | None = None
    sparse_layers: tuple[bool, ...] = ()
    labels: Labels | None = None
