"""Delta nets whose queries, keys and values are projected and convolved apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from rollout.kernels import causal_conv, gated_delta_rule, rms_norm
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build, Layer, whole_slot
from rollout.models.layers.conv_weight import ConvWeight
from rollout.models.layers.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from rollout.weights import Box, WeightSlot

PARTS = ("q", "k", "v")


class DeltaNetOfParts(Layer):
    """OLMo-Hybrid's gated delta net, or (``by_row``) Kimi's delta attention.

    As of a ``GatedDeltaNet``: [T, hidden] -> [T, hidden], one all-reduce, whole heads to each rank.
    ``A_log`` and ``dt_bias``: float32, of this rank's heads, or of each row of their states. By
    row, what decays and the gate behind are each made of a vector of a head's size, which all ranks
    have.
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        config, delta, arch = build.config, build.config.delta, build.config.arch.delta
        assert delta is not None
        assert arch is not None
        self.delta, self.by_row = delta, arch.by_row
        self.heads = delta.heads // build.tp.size
        self.key_heads = delta.key_heads // build.tp.size
        named = [(f"{part}_proj", size) for part, size in zip(PARTS, delta.parts, strict=True)]
        values, hidden = delta.heads * delta.dim, config.hidden_size
        if self.by_row:
            self.in_proj = _columns(build, hidden, *named, ("b_proj", delta.heads))
            for name, size in (("f", delta.heads * delta.key_dim), ("g", values)):
                self.add_module(f"{name}_a_proj", ReplicatedLinear(build, hidden, delta.dim))
                self.add_module(
                    f"{name}_b_proj", _columns(build, delta.dim, (f"{name}_b_proj", size))
                )
        else:
            gates = (("g_proj", values), ("b_proj", delta.heads), ("a_proj", delta.heads))
            self.in_proj = _columns(build, hidden, *named, *gates)
        self.convolutions = ConvOfParts(build)
        rates = (1, 1, self.heads, 1) if self.by_row else (self.heads,)
        self.declare("A_log", rates)
        self.declare("dt_bias", (self.heads * (delta.key_dim if self.by_row else 1),))
        eps = config.norm_eps if arch.norm_eps is None else arch.norm_eps
        self.o_norm = OutputNorm(build, delta.dim, eps, sigmoid=self.by_row)
        self.o_proj = RowLinear(build, values, hidden, False)

    def forward(self, x: Tensor, _cos_sin: object, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """``kv``: the states of this layer, of which those of ``batch.state_slots`` go on."""
        assert batch.state_slots is not None, "recurrent layers need slots for their states"
        where = batch.state_slots, batch.query_starts, batch.context_lens
        delta, keys = self.delta, self.key_heads * self.delta.key_dim
        values = self.heads * delta.dim
        taken = 2 * keys + values
        mixed, rest = torch.split(self.in_proj(x), [taken, self.in_proj.outputs - taken], dim=1)
        gate, betas, gates = self.gates(x, rest)
        mixed = causal_conv(mixed, self.convolutions.weight[:, 0], kv.k, *where)
        q, k, v = torch.split(mixed, [keys, keys, values], dim=1)
        out = gated_delta_rule(
            q.view(len(x), self.key_heads, delta.key_dim),
            k.view(len(x), self.key_heads, delta.key_dim),
            v.view(len(x), self.heads, delta.dim),
            gates,
            (betas.sigmoid() * delta.most).float(),
            kv.v,
            *where,
        )  # [T, heads, dim]
        normed = self.o_norm(out, gate.reshape(len(x), self.heads, delta.dim))
        projected: Tensor = self.o_proj(normed.flatten(1))
        return projected

    def gates(self, x: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Behind the scan [T, values]; of what is learnt [T, heads]; and how states decay: float32
        [T, heads] or [T, heads, key_dim]. ``rest``: what was projected beside q, k and v."""
        if not self.by_row:
            values = self.heads * self.delta.dim
            gate, betas, decays = torch.split(rest, [values, self.heads, self.heads], dim=1)
            return gate, betas, -self.A_log.exp() * softplus(decays.float() + self.dt_bias)
        low = {name: getattr(self, f"{name}_a_proj")(x) for name in "fg"}
        decays, gate = (getattr(self, f"{name}_b_proj")(low[name]) for name in "fg")
        rows = (decays.float() + self.dt_bias).view(len(x), self.heads, -1)
        return gate, rest, -self.A_log[0].exp() * softplus(rows)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """Of the axis that has the heads, this rank's."""
        rank, size, found = self.build.tp.rank, self.build.tp.size, []
        for name, spec in self.specs.items():
            axis = 2 if len(spec.shape) == 4 else 0
            whole = tuple(n * size if i == axis else n for i, n in enumerate(spec.shape))
            full = Box.full(spec.shape)
            by = tuple(rank * n if i == axis else 0 for i, n in enumerate(spec.shape))
            source = f"{prefix}.{name}"
            found.append(WeightSlot(source, whole, full.shifted(by), source, full))
        return found


class ConvOfParts(ConvWeight):
    """``q_conv1d``, ``k_conv1d`` and ``v_conv1d``, one behind the other."""

    def __init__(self, build: Build) -> None:
        delta, rank, size = build.config.delta, build.tp.rank, build.tp.size
        assert delta is not None
        parts = [(part, rank * part // size, part // size) for part in delta.parts]
        super().__init__(build, parts, delta.width)

    def slots(self, prefix: str) -> list[WeightSlot]:
        found, at, beside = [], 0, prefix.rpartition(".")[0]
        for part, (rows, first, count) in zip(PARTS, self.parts, strict=True):
            source, rest = f"{beside}.{part}_conv1d.weight", (1, self.width)
            take = Box((first, 0, 0), (first + count, *rest))
            put = Box((at, 0, 0), (at + count, *rest))
            found.append(WeightSlot(source, (rows, *rest), take, f"{prefix}.weight", put))
            at += count
        return found


class OutputNorm(Layer):
    """A root-mean-square norm of each head, times its gate's silu; or, ``sigmoid``, its sigmoid,
    and rounded once, behind it; replicated."""

    weight: Tensor

    def __init__(self, build: Build, size: int, eps: float, *, sigmoid: bool) -> None:
        super().__init__(build)
        self.eps, self.sigmoid = eps, sigmoid
        self.declare("weight", (size,))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float()
        if self.sigmoid:
            normed = rms_norm(x.float(), self.weight.float(), self.eps)
            return (normed * wide.sigmoid()).to(x.dtype)
        return (rms_norm(x, self.weight, self.eps).float() * silu(wide)).to(x.dtype)

    def slots(self, prefix: str) -> list[WeightSlot]:
        name = f"{prefix}.weight"
        return [whole_slot(name, self.specs["weight"].shape, name)]


def _columns(build: Build, inputs: int, *parts: tuple[str, int]) -> MergedColumnLinear:
    return MergedColumnLinear(build, inputs, list(parts), False)
