"""One sample of one request: its tokens, where their KV lies, and what came out so far."""

from __future__ import annotations

import sys
from collections.abc import Sequence as ReadOnly
from dataclasses import InitVar, dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from rollout.engine.sequences.draft_pace import DraftPace
from rollout.engine.sequences.expert_rows import ExpertRows
from rollout.engine.sequences.score_builder import ScoreBuilder
from rollout.engine.sequences.seen_tokens import SeenTokens
from rollout.engine.sequences.snapshot import Snapshot
from rollout.engine.sequences.span_builder import SpanBuilder
from rollout.engine.sequences.token_edits import TokenEdits
from rollout.engine.sequences.trial import Trial
from rollout.engine.sequences.visual_positions import VisualPositions
from rollout.generation import PlacedVisual, SamplingParams, VersionSpan
from rollout.generation.packed import experts_of
from rollout.weights.adapters import AdapterVersion


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Sequence:
    """A prompt and its growing output; ``seq_id`` rises with arrival and orders everything.

    ``token_ids`` is prompt then output; with ``shares_prompt`` it is the very list that was given,
    which the request's other samples have, too, until ``own_tokens``. The KV of positions ``<
    num_computed`` lies in the blocks of ``block_table`` (which may cover more). ``max_len`` tokens
    are the most there may be; ``stop_ids`` end the sequence earlier, and are masked while fewer
    than ``params.min_tokens`` tokens are out; ``bad_words`` are ids that may not come in a row;
    ``visual_positions``: where it shows something; ``adapter``: what the request's name meant when
    it came; ``pin``: the version that it is to finish on, where that is no longer live. ``seed`` is
    already this sample's own. The lists ``raw``, ``processed``, ``log_kept_mass`` (and ``top``
    unless None) have one entry per output token; ``scores``, where asked for, one per prompt
    position computed so far, from the first that is wanted on. ``target``: the token after the last
    one that is computed, of a prompt that is scored and not answered; ``draws``: whether tokens
    follow the prompt at all. ``hidden_state``: of the prompt's last token, once it is computed, or
    of all of them. ``experts``: those that its tokens were routed to, where asked for;
    ``forced_experts``: those that its prompt has to be routed to.

    Of a model whose layers have groups of pages: ``block_table`` is the first group's, which covers
    as much as the others or less, ``more_tables`` are those; ``gone``: how many blocks of each are
    given back, as no layer of the group reads them again. Their numbers mean nothing.

    Of a model with recurrent states: ``state_slot`` is this sequence's while it runs,
    ``held_state`` a snapshot that it or its forks go on from, ``restoring`` one that its next step
    begins with, ``saving`` one that this step makes, ``branch`` the blocks of a known prefix that
    ended in none; ``forks``: other samples go on from this one's prompt; ``trial``: where this step
    has drafts; ``undone``: what ``kv_spans`` were before it went back behind a wrong one, so that
    its next step computes known tokens again.

    ``drafting``: while it runs, where tokens may be drafted for it; ``num_drafted``: how many
    leading positions the draft model has keys and values of, where one drafts.
    """

    seq_id: int
    request_id: str
    index: int
    params: SamplingParams
    seed: int
    prompt_token_ids: InitVar[ReadOnly[int]]
    max_len: int = sys.maxsize
    stop_ids: frozenset[int] = frozenset()
    bad_words: ReadOnly[tuple[int, ...]] = ()
    token_edits: TokenEdits | None = None  # of ``params``, others' too; None: made here
    visual_positions: VisualPositions | None = None
    target: int | None = None
    adapter: AdapterVersion | None = None
    answered_by: str = ""  # ``name@version`` of the adapter that made its newest token
    adapter_place: int | None = None  # where it lies while this runs; None: in its slot
    pin: int | None = None
    shares_prompt: bool = False
    token_ids: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    penalised: bool = field(init=False)
    _seen: SeenTokens | None = field(init=False, default=None)  # while it runs and is penalised
    draws: bool = field(init=False)
    _prompt_cache_ids: list[int] = field(init=False)
    mask: NDArray[np.int32] | None = None  # over the next token, by its grammar
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached_tokens: int = -1  # until first admitted
    block_table: list[int] = field(default_factory=list)
    more_tables: list[list[int]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    hashed_blocks: int = 0  # how many leading blocks are in the hash chain
    chain_hash: bytes = b""
    digests_root: bytes = (
        b""  # what ``digests``, of the first full blocks of its tokens, start from
    )
    digests: list[bytes] = field(default_factory=list)
    state_slot: int = -1
    held_state: Snapshot | None = None
    restoring: Snapshot | None = None
    saving: Snapshot | None = None
    branch: int = 0
    trial: Trial | None = None
    undone: SpanBuilder | None = None
    forks: bool = False
    drafting: DraftPace | None = None
    num_drafted: int = 0
    kv_spans: SpanBuilder = field(default_factory=SpanBuilder)
    weight_versions: SpanBuilder = field(default_factory=SpanBuilder)
    raw: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    log_kept_mass: list[float] = field(default_factory=list)
    top: list[dict[int, float]] | None = None
    scores: ScoreBuilder | None = None
    kept: list[NDArray[np.int32]] | None = None  # of each output token, where asked for
    experts: ExpertRows | None = None
    forced_experts: NDArray[np.int16] | None = None
    hidden_state: list[float] | None = None
    hidden_part: NDArray[np.float32] | None = None  # of the prompt so far: a sum, or one by one
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self, prompt_token_ids: ReadOnly[int]) -> None:
        params = self.params
        if self.shares_prompt and isinstance(prompt_token_ids, list):
            self.token_ids = prompt_token_ids
        else:
            self.token_ids = list(prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        placed = self.visual_positions
        self._prompt_cache_ids = [] if placed is None else placed.cache_ids(prompt_token_ids)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.penalised = penalties != (1, 0, 0)
        if self.token_edits is None:
            self.token_edits = TokenEdits.of(params, self.stop_ids)
        self.draws = params.max_tokens != 0
        self.top = None if params.logprobs is None else []
        if params.return_sampling_mask:
            self.kept = []
        if params.return_routed_experts:
            self.experts = ExpertRows(params.routed_experts_prompt_start)
        if params.routed_experts is not None:
            self.forced_experts = experts_of(params.routed_experts)
        self._begin_scores()

    @property
    def group(self) -> tuple[str, bool]:
        """Of those that have one version where it is pinned: its ``group_id``, or its request."""
        named = self.params.group_id
        return (self.request_id, False) if named is None else (named, True)

    @property
    def shares_kv(self) -> bool:
        """Whether its KV is what any sequence of the same tokens would have."""
        return self.forced_experts is None

    def _begin_scores(self) -> None:
        params = self.params
        if params.prompt_logprobs is not None and self.index == 0:
            start = max(params.prompt_logprobs_start, 1)
            self.scores = ScoreBuilder(start, params.prompt_logprobs)

    @property
    def reads_tokens(self) -> bool:
        """Whether what may be drawn depends on the tokens before: no step is begun without them."""
        structured = self.params.structured_outputs is not None
        return self.penalised or structured or any(len(word) > 1 for word in self.bad_words)

    def seen_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Its tokens, each once, and how often the output has each."""
        if self._seen is None:
            self._seen = SeenTokens(self.token_ids[: self.prompt_len])
        return self._seen.after(self.token_ids)

    @property
    def waits_for_mask(self) -> bool:
        """Whether its grammar has not yet said what its next token may be."""
        return self.mask is None and self.params.structured_outputs is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def adapter_name(self) -> str:
        """``name@version``; "" for the base alone."""
        return "" if self.adapter is None else str(self.adapter)

    @property
    def visuals(self) -> ReadOnly[PlacedVisual]:
        return () if self.visual_positions is None else self.visual_positions.visuals

    def cache_ids(self, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """The tokens of these positions as the prefix cache tells them apart."""
        own = self._prompt_cache_ids
        if not own:
            return tuple(self.token_ids[start:stop])
        return (*own[start:stop], *self.token_ids[max(start, len(own)) : stop])

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def scored_positions(self) -> range:
        """Those whose logits give the logprob of the token after each."""
        if self.scores is None:
            return range(0)
        stop = self.prompt_len - (self.target is None)
        return range(min(self.scores.start - 1, stop), stop)

    @property
    def needs_scores(self) -> bool:
        """Whether logits of prompt positions are still wanted."""
        return self.scores is not None and self.scores.length < len(self.scored_positions)

    @property
    def cacheable(self) -> int:
        """How many leading positions may come from a cache: the others have to be computed."""
        most = self.num_tokens - 1
        whole = self.needs_hidden_state and not self.params.pools_last
        if whole or not self.shares_kv:
            return 0
        if self.needs_hidden_state:
            most = min(most, self.prompt_len - 1)
        return min(most, self.scored_positions.start) if self.needs_scores else most

    def scored_tokens(self, positions: range) -> list[int]:
        """The tokens after ``positions``."""
        found = self.token_ids[positions.start + 1 : positions.stop + 1]
        if len(found) < len(positions) and self.target is not None:
            found.append(self.target)
        return found

    @property
    def needs_hidden_state(self) -> bool:
        """Whether hidden states of the prompt are still wanted."""
        return self.params.hidden_state and self.index == 0 and self.hidden_state is None

    def staleness(self, live: int) -> int:
        """How many versions its oldest token is behind ``live``; 0 where it has none."""
        oldest = self.weight_versions.oldest
        return 0 if oldest is None else max(live - oldest, 0)

    def stamp(self, version: int) -> int:
        """The newest commit that changed what it is computed by: the base, of ``version``, or its
        adapter.
        """
        return version if self.adapter is None else max(version, self.adapter.version)

    @property
    def told_kv_spans(self) -> SpanBuilder:
        """As if it never went back."""
        return self.kv_spans if self.undone is None else self.undone

    def stamped_kv_spans(self) -> tuple[VersionSpan, ...]:
        """``told_kv_spans``, which are the base's versions, as ``stamp`` has them."""
        if self.adapter is None:
            return self.told_kv_spans.spans()
        stamped = SpanBuilder()
        for span in self.told_kv_spans.spans():
            stamped.extend(self.stamp(span.version), span.stop - span.start)
        return stamped.spans()

    def take_hidden(self, states: NDArray[np.float32], last: bool) -> None:
        """What a step brought of its part of the prompt: its last hidden state or their sum [1,
        size], or all of them.
        """
        pooling = self.params.pooling
        if self.hidden_part is not None and pooling == "mean":
            states = self.hidden_part + states
        elif self.hidden_part is not None:
            states = np.concatenate([self.hidden_part, states])
        self.hidden_part = None if last else states
        if last:
            found = states / self.prompt_len if pooling == "mean" else states
            self.hidden_state = found.ravel().tolist()

    def own_tokens(self) -> None:
        """Before it runs, or has tokens of its own: a list that only it appends to."""
        if self.shares_prompt:
            self.token_ids, self.shares_prompt = list(self.token_ids), False

    def append(self, token: int, version: int, raw: float, processed: float, mass: float) -> None:
        """Add one sampled token, whose logits the base of ``version`` gave, with its adapter."""
        self.mask = None
        self.token_ids.append(token)
        self.raw.append(raw)
        self.processed.append(processed)
        self.log_kept_mass.append(mass)
        self.cumulative_logprob += raw
        if self.adapter is not None:
            version, self.answered_by = self.stamp(version), self.adapter_name
        self.weight_versions.extend(version, 1)

    def advance(self, count: int, version: int) -> None:
        """The KV of the next ``count`` positions was computed by ``version``."""
        self.num_computed += count
        self.undone = None
        self.kv_spans.extend(version, count)

    def go_back(self, position: int) -> None:
        """What comes after ``position`` is computed again."""
        self.num_computed, self.undone = position, self.kv_spans
        self.kv_spans = self.kv_spans.prefix(position)

    def forget_kv(self) -> None:
        """Start over from position 0, keeping the output; the blocks are the caller's to free."""
        self.num_computed = self.num_drafted = 0
        self.undone = None
        self.kv_spans.clear()
        self.block_table, self.more_tables, self.gone = [], [], []
        self.hashed_blocks = 0
        self.chain_hash = b""
        # Where it has given no token by them, what is computed now counts, maybe by other weights.
        anew = not self.output_len and self.status is not Status.FINISHED
        if anew or self.needs_scores:
            self._begin_scores()
        self.hidden_part = self._seen = None
        if anew and self.experts is not None:
            self.experts = ExpertRows(self.experts.start)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request_id!r}[{self.index}], {self.status.name}, "
            f"{self.num_computed}/{self.num_tokens} computed)"
        )


@dataclass(slots=True)
class ScheduledEntry:
    """The ``num_new`` tokens after ``sequence.num_computed`` are computed this step.

    The last of them may be ``drafts``, which are not known yet: each is right if it is what the
    step draws before it. Those that the draft model draws in the step are -1 until it is done;
    ``draft_context``: the positions that it computes first, where it reads the tokens
    ``draft_ahead`` behind them.
    """

    sequence: Sequence
    num_new: int
    drafts: tuple[int, ...] = ()
    draft_context: range = range(0)
    draft_ahead: int = 0

    @property
    def start(self) -> int:
        return self.sequence.num_computed

    @property
    def stop(self) -> int:
        return self.sequence.num_computed + self.num_new

    @property
    def samples(self) -> bool:
        """Whether the step reaches the end of the known tokens and so draws the next one."""
        seq = self.sequence
        known = self.num_new - len(self.drafts)
        return seq.draws and seq.num_computed + known == len(seq.token_ids)

    @property
    def draws_alone(self) -> bool:
        """Whether the step draws one token of this sequence, and brings nothing else."""
        seq = self.sequence
        return self.samples and not (self.drafts or seq.needs_scores or seq.needs_hidden_state)

    @property
    def hidden_positions(self) -> range:
        """Positions whose hidden states the step brings; mostly empty."""
        seq = self.sequence
        if not seq.needs_hidden_state:
            return range(0)
        first = seq.prompt_len - 1 if seq.params.pools_last else 0
        return range(max(self.start, first), min(self.stop, seq.prompt_len))

    @property
    def num_hidden(self) -> int:
        """As how many rows they come: one by one, or as one sum."""
        count = len(self.hidden_positions)
        return count if self.sequence.params.pools_each else min(count, 1)

    @property
    def expert_positions(self) -> range:
        """Positions whose experts the step brings: of what it computes, and what a cache had."""
        experts = self.sequence.experts
        return range(0) if experts is None else range(experts.stop, max(experts.stop, self.stop))

    @property
    def prompt_rows(self) -> range:
        """Positions whose logits give prompt logprobs (of the token after each); mostly empty."""
        if not self.sequence.needs_scores:
            return range(0)
        wanted = self.sequence.scored_positions
        return range(max(self.start, wanted.start), min(self.stop, wanted.stop))


@dataclass(slots=True)
class ScheduledBatch:
    """One step's work; ``version`` is the weights' version that every rank must report back.

    ``number`` counts up by one from step to step. ``previous_rows``, of a step that is begun before
    the one ahead of it has ended: for each entry (which all have one token) the row of that step
    that draws it. Until that step is booked, ``start``, ``stop`` and the lengths of its sequences
    are less than they will be. ``runs_draft``: the draft model runs for some entries.
    """

    entries: list[ScheduledEntry] = field(default_factory=list)
    version: int = 0
    number: int = 0
    previous_rows: list[int] | None = None
    runs_draft: bool = False

    @property
    def drawing(self) -> list[Sequence]:
        """Of the entries that sample, in their order; without drafts."""
        return [
            seq
            for entry in self.entries
            if (seq := entry.sequence).draws
            and seq.num_computed + entry.num_new == len(seq.token_ids)
        ]

    @property
    def rows_running(self) -> list[int]:
        """Which entries' sequences still run; all, unless the step was begun ahead."""
        running = Status.RUNNING
        return [row for row, e in enumerate(self.entries) if e.sequence.status is running]

    def rows(self, rows: list[int]) -> ScheduledBatch:
        """The entries ``rows`` alone."""
        ahead, entries = self.previous_rows, [self.entries[row] for row in rows]
        return replace(
            self,
            entries=entries,
            previous_rows=None if ahead is None else [ahead[row] for row in rows],
            runs_draft=any(entry.draft_context for entry in entries),
        )

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new for entry in self.entries)
