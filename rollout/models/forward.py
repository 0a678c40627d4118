"""What one forward pass needs besides weights: the batch of tokens and the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VisualRows:
    """The tokens of a step that stand for what is seen, and what the tower made of that."""

    rows: Tensor  # [parts] int64, of the step's tokens
    features: Tensor  # [parts, 1 + levels, hidden]: embeddings, what is added behind early blocks

    @classmethod
    def none(cls, hidden: int, dtype: torch.dtype, device: torch.device) -> VisualRows:
        rows = torch.empty(0, dtype=torch.int64, device=device)
        return cls(rows, torch.empty(0, 1, hidden, dtype=dtype, device=device))


@dataclass(slots=True)
class ChosenTokens:
    """What an index chose in this step, handed from its layer to those behind that have none.

    As ``kernels.select_tokens`` returns it; None where each token attends to all before it.
    """

    slots: Tensor | None = None  # [tokens, most] int32
    counts: Tensor | None = None  # [tokens] int32


@dataclass(frozen=True, slots=True)
class HiddenPages:
    """Where hidden states of tokens are kept, by their slots, for a prediction head.

    ``layers``: of each token those that these layers read, side by side, before any norm (one more
    than the last layer: what that one makes); none: the one behind the last norm.
    """

    pages: Tensor  # [slots + 1, states x hidden size]
    layers: tuple[int, ...] = ()

    def keep(self, batch: ForwardBatch, states: Tensor, place: int = 0) -> None:
        """``states`` [tokens, hidden size], as the one of number ``place`` of each token."""
        first = place * states.shape[1]
        self.pages[:, first : first + states.shape[1]][batch.token_slots] = states

    def keep_before(
        self, layer: int, batch: ForwardBatch, x: Tensor, residual: Tensor | None
    ) -> None:
        """What ``layer`` reads, if that is wanted: x and the sum that travels beside it."""
        if layer in self.layers:
            states = x if residual is None else x + residual
            for place, wanted in enumerate(self.layers):
                if wanted == layer:
                    self.keep(batch, states, place)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of several sequences, concatenated; prefill chunks and decodes are not told apart.

    Sequence ``s`` owns rows ``query_starts[s]:query_starts[s+1]``: the last tokens of a context of
    ``context_lens[s]`` tokens (this step's included). ``block_tables[s]`` lists the KV blocks of
    its positions in order; ``slot_mapping[t]`` is ``block * block_size + offset`` of token ``t``.
    Of a model whose layers have several groups of pages both have one more dimension in front:
    each group's; what a block table lists before the first position in reach means nothing.
    Of a mixture: ``forced_experts`` says what tokens are routed to (-1: as the router chooses), and
    what they were routed to is written to ``expert_pages`` by their slots; slot -1 is the last row.
    So are hidden states, where a prediction head reads them.
    """

    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64; [3, tokens] (time, row, column) where something is seen
    slot_mapping: Tensor  # [tokens] int64, or [groups, tokens]
    query_starts: Tensor  # [sequences + 1] int32
    context_lens: Tensor  # [sequences] int32
    block_tables: Tensor  # [(groups,) sequences, max_blocks] int32, padded with 0
    logit_rows: Tensor  # [rows] int64: the tokens whose logits are wanted
    visual: VisualRows | None = None
    forced_experts: Tensor | None = None  # [tokens, sparse layers, experts of a token] int16
    expert_pages: Tensor | None = None  # [slots + 1, sparse layers, experts of a token]
    hidden_pages: HiddenPages | None = None
    state_slots: Tensor | None = None  # [sequences] int32: of recurrent states, where there are any
    adapter_rows: Tensor | None = None  # int32: the tokens that have adapters, where there are any
    adapter_tiles: Tensor | None = None  # [tiles, 3] int32: (slot, start, stop) of adapter_rows
    chosen: ChosenTokens | None = None  # of sparse attention
    lasting_slots: Tensor | None = None  # [tokens] int64, of whole tokens, if not ``slot_mapping``
    before: Tensor | None = None  # [tokens, hidden size]: what a prediction head reads

    def part(self, start: int, stop: int) -> ForwardBatch:
        """Of a batch on the CPU in which nothing is seen or adapted: its tokens ``start:stop``, and
        of ``logit_rows`` those among them, in their order. What comes before has to run first.
        """
        uncut = self.visual, self.adapter_rows, self.before, self.lasting_slots
        assert all(each is None for each in uncut)
        ends = self.query_starts[1:].clamp(start, stop)
        starts = self.query_starts[:-1].clamp(start, stop)
        held = ends > starts
        cut = (self.query_starts[1:] - ends).clamp(min=0)  # tokens that come in a later part
        rows, state_slots, forced = self.logit_rows, self.state_slots, self.forced_experts
        return replace(
            self,
            input_ids=self.input_ids[start:stop],
            positions=self.positions[..., start:stop],
            slot_mapping=self.slot_mapping[..., start:stop],
            query_starts=torch.cat((starts[held], ends[-1:])) - start,
            context_lens=(self.context_lens - cut)[held],
            block_tables=self.block_tables[..., held, :],
            logit_rows=rows[(rows >= start) & (rows < stop)] - start,
            forced_experts=None if forced is None else forced[start:stop],
            state_slots=None if state_slots is None else state_slots[held],
        )

    @property
    def token_slots(self) -> Tensor:
        """[tokens] int64: of what is kept of whole tokens."""
        slots = self.slot_mapping if self.lasting_slots is None else self.lasting_slots
        return slots if slots.dim() == 1 else slots[-1]

    def keep_experts(self, *chosen: Tensor | None) -> None:
        """Write what tokens were routed to, by some layers and those behind them, to the pages."""
        told, pages = [each for each in chosen if each is not None], self.expert_pages
        if pages is not None and told:
            pages[self.token_slots] = torch.cat([each.to(pages.dtype) for each in told], 1)

    def of_group(self, group: int) -> ForwardBatch:
        """As the layers of one of several groups see it; the last keeps every position."""
        return replace(
            self,
            slot_mapping=self.slot_mapping[group],
            block_tables=self.block_tables[group],
            lasting_slots=self.slot_mapping[-1],
        )


class RoutedExperts:
    """The experts of one forward pass, handed from one layer that has some to the next.

    ``before``: of a stage of a pipeline, how many such layers others have that come first.
    """

    def __init__(self, forced: Tensor | None, before: int = 0) -> None:
        self._forced, self._before, self._chosen = forced, before, list[Tensor]()

    @classmethod
    def of(cls, batch: ForwardBatch) -> RoutedExperts | None:
        """None where nobody tells experts, or asks for them."""
        wanted = batch.forced_experts is not None or batch.expert_pages is not None
        return cls(batch.forced_experts) if wanted else None

    @property
    def forced(self) -> Tensor | None:
        """[tokens, experts of a token] int64 of the next layer, -1 where its router chooses."""
        layer = self._before + len(self._chosen)
        return None if self._forced is None else self._forced[:, layer].long()

    def add(self, chosen: Tensor) -> None:
        """What the next layer's tokens were routed to, [tokens, experts of a token]."""
        self._chosen.append(chosen)

    @property
    def chosen(self) -> Tensor | None:
        """Those of all layers here, [tokens, layers, experts of a token]; None: there are none."""
        return torch.stack(self._chosen, 1) if self._chosen else None


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps, written in place: pages; of latent attention one tensor, which is both.

    Of a layer with a recurrent state ``k`` is the inputs that its convolution still needs, ``v``
    the state, of each slot: [slots, channels of this rank, width - 1], and float32
    [slots, heads of this rank, size of a key, dim]. ``beside``: those of a
    layer that has pages, too. ``index``: keys by which sparse attention chooses its tokens.
    ``k_scales``, ``v_scales``: where pages hold codes (``kernels.kv_codes``).
    """

    k: Tensor  # [num_blocks, kv_heads of this rank, block_size, head_dim]
    v: Tensor  # the same
    k_scales: Tensor | None = None  # [num_blocks, kv_heads, block_size] float32, of codes
    v_scales: Tensor | None = None
    beside: LayerKV | None = None
    index: Tensor | None = None  # [num_blocks, 1, block_size, its own dim]
