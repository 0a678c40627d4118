"""A head that guesses tokens by the policy's hidden states, and the files that one comes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rollout.errors import ConfigError, some
from rollout.models.causal_lm import CausalLM
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import CosSin
from rollout.models.layers.base import Build
from rollout.models.layers.rotary import Rotary
from rollout.models.model import Model
from rollout.weights import TensorMeta

REMEDY = "hold it without draft_component"


class PredictionHead(Model):
    """Guesses the token behind the next one, of the next one and the policy's states before it.

    Runs one attending decoder layer on both, which is cut over the ranks. What comes out may stand
    in the place of the policy's states, for the token behind. How both are joined is a subclass's.
    Nothing here is quantised, or deterministic.

    ``told``: what it is, in words. ``reads``: which states, as ``HiddenPages.layers``.
    """

    told: ClassVar[str]
    reads: tuple[int, ...] = ()

    def __init__(self, build: Build, max_len: int, rotary: Rotary) -> None:
        super().__init__(build, max_len)
        self.rotary = rotary

    @torch.no_grad()
    def first(self, states: Tensor) -> Tensor:
        """What is ``before`` the tokens of the first pass, [T, hidden size], of what the policy's
        pages have there: [T, states x the policy's hidden size].
        """
        return states

    @torch.no_grad()
    def hidden_states(
        self, policy: CausalLM, batch: ForwardBatch, kv: Sequence[LayerKV], before: Tensor
    ) -> Tensor:
        """[rows, hidden size] of ``batch.logit_rows``, for ``logits``, and as what is ``before``
        the next token.

        ``before`` [T, hidden size]: what ``first`` gave at each position, or this did;
        ``batch.input_ids`` are the tokens that came of those, one behind each position, and
        positions are [T]. ``kv``: of the one layer. Adapters of the policy have no part in it.
        Collective: all ranks call it in lockstep; 3 all-reduces.
        """
        with policy.unadapted():
            tokens = self.embedded(policy, batch.input_ids)
        x, residual = self.joined(tokens, before, self.rotary(batch.positions), batch, kv[0])
        return self.ended(x[batch.logit_rows], residual[batch.logit_rows])

    def embedded(self, policy: CausalLM, ids: Tensor) -> Tensor:
        """Token ids [T] -> [T, hidden size]; one all-reduce."""
        raise NotImplementedError

    def joined(
        self, tokens: Tensor, before: Tensor, cos_sin: CosSin, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """What the layer makes of tokens and states [T, hidden size], and the residual sum."""
        raise NotImplementedError

    def ended(self, x: Tensor, residual: Tensor) -> Tensor:
        """What goes on of both, [rows, hidden size]."""
        raise NotImplementedError

    def logits(self, policy: CausalLM, states: Tensor) -> Tensor:
        """[rows, vocab_size of the policy] of what ``hidden_states`` gave; one all-gather."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        raise NotImplementedError("a prediction head runs behind a policy: hidden_states, logits")

    def refuse_missing(self, what: str, tensors: Sequence[TensorMeta]) -> None:
        """``ConfigError`` where the files of ``what``, of ``tensors``, lack some of its table's."""
        spelled = self.table.spellings.split_shape
        held = {name for meta in tensors for name, _ in spelled(meta.name, meta.shape)}
        if missing := sorted(self.table.slots.keys() - held):
            raise ConfigError(
                f"{what} cannot run without {some(missing)}, which its files lack; {REMEDY}"
            )


class HeadBehind:
    """A head and the policy that it runs behind, as a model that reads ``ForwardBatch.before``."""

    captures_prompts = True
    adapters = None

    def __init__(self, head: PredictionHead, policy: CausalLM) -> None:
        self.head, self.policy = head, policy
        self.config, self.build, self.max_len = head.config, head.build, head.max_len

    def __call__(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Logits of ``batch.logit_rows``, whose states come to lie in the first rows of
        ``batch.before``; no more rows than tokens.
        """
        assert batch.before is not None
        states = self.hidden_states(batch, kv)
        logits = self.logits(states)
        batch.before[: len(states)].copy_(states)
        return logits

    def hidden_states(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        assert batch.before is not None
        return self.head.hidden_states(self.policy, batch, kv, batch.before)

    def logits(self, states: Tensor) -> Tensor:
        return self.head.logits(self.policy, states)


class HeadFiles(Protocol):
    """The files of a head, before it is built."""

    def fault(self) -> str:
        """Why it cannot run beside any policy, and what to do; "" where it can. Takes no memory."""
        ...

    def build(self, beside: Build, longest: int) -> PredictionHead:
        """Empty, to run beside the policy that was built as ``beside`` says, on sequences of at
        most ``longest`` tokens; ``ConfigError`` where it is not of that policy.
        """
        ...
