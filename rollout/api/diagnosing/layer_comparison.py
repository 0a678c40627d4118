"""The engine's model and a trainer's, module beside module: each of ours runs on what the trainer's
was given there, so that a difference is of that module alone and not of those before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.errors import ConfigError, some
from rollout.models.causal_lm import CausalLM
from rollout.models.decoder.blocks import DecoderBlock
from rollout.models.decoder.chunks import within_chunks
from rollout.models.decoder.moe import SparseMoE, route
from rollout.models.forward import ChosenTokens, ForwardBatch, LayerKV
from rollout.models.layers.attention import Attention
from rollout.models.layers.norm import Norm

BLOCK = 16  # tokens of one KV block
_LAYER = re.compile(r"layers\.\d+")
# By kind of module: what rounding alone may differ by, relative to the root mean square, in units
# of the coarser dtype's epsilon.
NOISE = {"embedding": 2.0, "norm": 8.0, "rope": 8.0, "router": 64.0, "head": 64.0}
MOST = 64.0  # of what sums over many
LEAST = 1e-5  # kernels sum in another order, also in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One module on both sides. ``difference``: root mean square of theirs minus ours, relative to
    theirs; ``noise``: what rounding may give; ``detail``: what more is known of it.
    """

    # embedding | norm | rope | attention | mlp | router | experts | block | layers | head
    kind: str
    name: str
    difference: float
    noise: float
    detail: str = ""

    @property
    def differs(self) -> bool:
        return not self.difference <= self.noise  # NaN differs


@dataclass(slots=True)
class _Seen:
    """What a module of the trainer's got and gave, of all sequences, tokens in a row."""

    inputs: list[Tensor]
    outputs: list[Any]

    @property
    def x(self) -> Tensor:
        return torch.cat(self.inputs)

    @property
    def out(self) -> Tensor:
        return torch.cat(self.outputs)


class TrainerRun:
    """A forward pass of a transformers model over ``sequences``, each alone, and what its modules
    saw. ``logits``: [tokens, vocabulary] float32, of all sequences in a row.
    """

    def __init__(self, model: nn.Module, sequences: Sequence[Sequence[int]]) -> None:
        self.decoder = _decoder(model)
        self.seen: dict[str, _Seen] = {}
        self.logits_dtype = torch.float32
        head = cast(Any, model).get_output_embeddings()
        watched = dict(self.decoder.named_modules())
        handles = [
            module.register_forward_hook(self._noting(name), with_kwargs=True)
            for name, module in (*watched.items(), ("lm_head", head))
            if name
        ]
        device = next(model.parameters()).device
        training, logits = model.training, []
        model.eval()
        try:
            with torch.no_grad():
                for ids in sequences:
                    out = model(torch.tensor([list(ids)], device=device), use_cache=False).logits
                    self.logits_dtype = out.dtype
                    logits.append(out[0].float().cpu())
        finally:
            model.train(training)
            for handle in handles:
                handle.remove()
        self.logits = torch.cat(logits)

    def _noting(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            x = args[0] if args else kwargs.get("hidden_states", kwargs.get("input"))
            seen = self.seen.setdefault(name, _Seen([], []))
            if isinstance(x, Tensor):
                seen.inputs.append(_rows(x))
            if name.endswith("rotary_emb") and isinstance(out, tuple):
                seen.outputs.append(torch.stack([_rows(part) for part in out[:2]], dim=1))
                return
            if name.endswith(".router") and isinstance(out, tuple) and len(out) == 2:
                out = out[::-1]  # Llama 4's gives its logits behind the scores
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, Tensor):
                seen.outputs.append(_rows(first))

        return note


def _rows(x: Tensor) -> Tensor:
    """[1, T, ...] or [T, ...] -> [T, ...] on the host."""
    x = x.detach().cpu()
    return x[0] if x.dim() > 2 and x.shape[0] == 1 else x


def _decoder(model: nn.Module) -> nn.Module:
    """What has embeddings, layers and the final norm."""
    found = getattr(model, "model", model)
    inner = getattr(found, "language_model", found)
    return cast(nn.Module, inner)


def batch_of(sequences: Sequence[Sequence[int]]) -> ForwardBatch:
    """All tokens of all sequences in one step, with the logits of all of them."""
    ids: list[int] = []
    positions: list[int] = []
    slots, starts, tables, used = [], [0], [], 0
    longest = max(-(-len(s) // BLOCK) for s in sequences)
    for sequence in sequences:
        count = -(-len(sequence) // BLOCK)
        tables.append([*range(used, used + count), *[0] * (longest - count)])
        slots += [used * BLOCK + i for i in range(len(sequence))]
        ids += sequence
        positions += range(len(sequence))
        starts.append(len(ids))
        used += count
    return ForwardBatch(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([len(s) for s in sequences], dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32),
        torch.arange(len(ids)),
        chosen=ChosenTokens(),
    )


def pages_for(model: CausalLM, sequences: Sequence[Sequence[int]]) -> list[LayerKV]:
    config = model.config
    tensors, heads, elements = config.cached_heads(1)
    blocks = sum(-(-len(s) // BLOCK) for s in sequences)
    pages = []
    latent = config.latent
    for layer in range(config.num_layers):
        k = torch.zeros(blocks, heads, BLOCK, elements, dtype=model.build.dtype)
        index = None
        if latent is not None and latent.index is not None and layer in config.indexed_layers:
            index = k.new_zeros(blocks, 1, BLOCK, latent.index.dim)
        pages.append(LayerKV(k, k if tensors == 1 else k.clone(), index=index))
    return pages


class LayerComparison:
    """Compares ``ours``, on the host, with a ``TrainerRun``."""

    def __init__(
        self, ours: CausalLM, theirs: TrainerRun, sequences: Sequence[Sequence[int]]
    ) -> None:
        self.ours, self.theirs = ours, theirs
        self.batch, self.pages = batch_of(sequences), pages_for(ours, sequences)
        self.flips = 0  # tokens of which a layer chose other experts, by all layers

    @torch.no_grad()
    def places(self) -> Iterator[Place]:
        """Every module that both sides have, in the order of a forward pass."""
        ours = self.ours
        found = self.theirs.seen.get("layers.0")
        if found is not None and found.inputs:
            made = ours.model.embedding(self.batch.input_ids) * ours.embedding_scale
            detail = f"what embeddings are multiplied by (here {ours.embedding_scale:g})"
            yield self._place("embedding", "embed_tokens", made, found.x, detail)
        yield from self._rope()
        for index, block in enumerate(ours.model.layers):
            yield from self._block(index, cast(DecoderBlock, block))
        yield from self._not_compared()
        yield from self._norm("norm", ours.model.last_norm)
        yield self._head()

    def _not_compared(self) -> Iterator[Place]:
        """Layers that one side alone has run."""
        ours = [f"layers.{index}" for index in range(len(self.ours.model.layers))]
        theirs = [name for name in self.theirs.seen if _LAYER.fullmatch(name)]
        if not theirs:
            raise ConfigError(
                "diagnose: no layers.N of the reference has run, so that there is nothing to "
                "compare: give the transformers model itself, without what wraps it"
            )
        for where, run, others in (("here", ours, theirs), ("there", theirs, ours)):
            if alone := [name for name in run if name not in others]:
                yield Place(
                    kind="layers", name=alone[0], difference=float("inf"), noise=0.0,
                    detail=f"not compared: {some(alone)} ran {where} alone",
                )  # fmt: skip

    def _block(self, index: int, block: DecoderBlock) -> Iterator[Place]:
        prefix = f"layers.{index}"
        inner: list[Place] = []
        for name, module in block.named_modules():
            if isinstance(module, Norm) and "." not in name:
                inner += self._norm(f"{prefix}.{name}", module)
        mixer = getattr(block, block.mixer_name)
        inner += self._attention(index, f"{prefix}.{block.mixer_name}", mixer)
        inner += self._feed_forward(self._mlp(index, block), getattr(block, block.mlp_name))
        yield from inner
        seen = self.theirs.seen.get(prefix)
        if seen is None or any(place.differs for place in inner) or not seen.inputs:
            return
        out, residual = block(self._cast(seen.x), None, self._turn(index), *self._kv(index))
        yield self._place(
            "block", prefix, out.float() + residual.float(), seen.out,
            "its parts agree: the order of norms, a residual's scale, or what is added twice",
        )  # fmt: skip

    def rerouted(self, told: Sequence[NDArray[Any]]) -> Tensor:
        """Which tokens, of all sequences in a row, the trainer sent to other experts, in any layer,
        than ``told``: ``Completion.routed_experts`` of each sequence, which has one row less.
        """
        found = torch.zeros(len(self.batch.input_ids), dtype=torch.bool)
        starts = self.batch.query_starts[:-1].long().tolist()
        layers = 0
        for index, block in enumerate(self.ours.model.layers):
            module = getattr(block, str(block.mlp_name))
            if not isinstance(module, SparseMoE):
                continue
            theirs = self._chosen(self._mlp(index, cast(DecoderBlock, block)), module)
            layers += 1
            if theirs is None:
                continue
            for start, rows in zip(starts, told, strict=True):
                one = torch.from_numpy(rows[:, layers - 1].astype("int64"))
                own = theirs[start : start + len(one)]
                differs = own.sort(-1).values != one.sort(-1).values
                found[start : start + len(one)] |= differs.any(-1)
        return found

    def _mlp(self, index: int, block: DecoderBlock) -> str:
        """What the trainer calls a feed-forward: as the file does, or transformers' own name."""
        name = f"layers.{index}.{block.mlp_name}"
        return name if name in self.theirs.seen else f"layers.{index}.mlp"

    def _norm(self, name: str, norm: nn.Module) -> list[Place]:
        seen = self.theirs.seen.get(name)
        if seen is None or not seen.inputs:
            return []
        detail = "epsilon, an offset of one, or the dtype that it is computed in"
        return [self._place("norm", name, norm(self._cast(seen.x)), seen.out, detail)]

    def _attention(self, index: int, name: str, mixer: nn.Module) -> list[Place]:
        seen = self.theirs.seen.get(name)
        if seen is None or not seen.inputs:
            return []
        places: list[Place] = []
        if isinstance(mixer, Attention):
            for part, norm in (("q_norm", mixer.q_norm), ("k_norm", mixer.k_norm)):
                if isinstance(norm, Norm):
                    places += self._norm(f"{name}.{part}", norm)
        made = mixer(self._cast(seen.x), self._turn(index), *self._kv(index))
        whole = self._place("attention", name, made, seen.out)
        if whole.differs:
            whole = self._of_attention(index, whole, mixer)
        return [*places, whole]

    def _of_attention(self, index: int, whole: Place, mixer: nn.Module) -> Place:
        """Which part of it: the projection behind the heads, or what the heads give."""
        seen = self.theirs.seen.get(f"{whole.name}.o_proj")
        detail = "scores: their scale, soft cap, window or mask, the rotation, or the projections"
        if seen is not None and seen.inputs and isinstance(mixer, Attention):
            made = mixer.o_proj(self._cast(seen.x).reshape(len(seen.x), -1))
            if self._place("attention", whole.name, made, seen.out).differs:
                detail = "its output projection"
        config = self.ours.config.layers[index]
        detail += f" (here: scale {self.ours.config.attention_scale:g}, window {config.window}"
        detail += f", soft cap {self.ours.config.attention_softcap})"
        return _with(whole, detail=detail)

    def _feed_forward(self, name: str, module: nn.Module) -> list[Place]:
        seen = self.theirs.seen.get(name)
        if seen is None or not seen.inputs:
            return []
        places = []
        if isinstance(module, SparseMoE):
            places += self._router(name, module, self._cast(seen.x))
        kind = "experts" if isinstance(module, SparseMoE) else "mlp"
        detail = "the activation, gate and up in each other's places, or a bias"
        places.append(self._place(kind, name, module(self._cast(seen.x)), seen.out, detail))
        return places

    def _router(self, name: str, module: SparseMoE, x: Tensor) -> list[Place]:
        router = getattr(module, module.moe.arch.router)
        seen = self.theirs.seen.get(f"{name}.{module.moe.arch.router}")
        logits = router(x)
        if seen is None or not seen.outputs or seen.out.shape != logits.shape:
            return []
        chosen, _ = route(logits, module.moe, router.e_score_correction_bias)
        theirs = self._chosen(name, module)
        assert theirs is not None
        flips = int((chosen.sort(-1).values != theirs.sort(-1).values).any(-1).sum())
        self.flips += flips
        detail = f"{flips} of {len(x)} tokens go to other experts"
        return [self._place("router", f"{name}.gate", logits, seen.out, detail)]

    def _chosen(self, name: str, module: SparseMoE) -> Tensor | None:
        """Each token's experts by the trainer's router; None where its logits are not known."""
        router = getattr(module, module.moe.arch.router)
        seen = self.theirs.seen.get(f"{name}.{module.moe.arch.router}")
        if seen is None or not seen.outputs or seen.out.shape[-1] != module.moe.num_experts:
            return None
        return route(seen.out.float(), module.moe, router.e_score_correction_bias)[0]

    def _rope(self) -> list[Place]:
        seen = self.theirs.seen.get("rotary_emb")
        if seen is None or not seen.outputs:
            return []
        for rotary in self.ours.rotaries:
            made = torch.stack(rotary(self.batch.positions), dim=1)
            if made.shape != seen.out.shape:
                return []
            place = self._place("rope", "rotary_emb", made, seen.out, "theta, or its scaling")
            if not place.differs:
                break
        return [place]

    def _head(self) -> Place:
        """From what the trainer's head was given to its logits, soft cap and scale included."""
        seen = self.theirs.seen["lm_head"]
        x = self._cast(seen.x)
        bare = self.ours.head.logits(x)
        made, theirs = self.ours.logits(x), self.theirs.logits
        both = (bare.dtype, self.theirs.logits_dtype)
        dtype = max(both, key=lambda one: torch.finfo(one).eps)
        if made.shape != theirs.shape:
            sizes = f"{theirs.shape[-1]} tokens there, {made.shape[-1]} here"
            return Place(
                kind="head", name="lm_head", difference=float("inf"), noise=0.0,
                detail=f"the vocabulary has {sizes}",
            )  # fmt: skip
        place = self._place("head", "lm_head", made, theirs, extra=dtype)
        if not place.differs:
            return place
        if not self._place("head", "lm_head", bare, theirs, extra=dtype).differs:
            caps = self.ours.config
            told = f"soft cap {caps.logits_softcap}, scale {caps.logits_scale:g}"
            return _with(place, detail=f"the trainer leaves out what follows it here: {told}")
        factor = float((made * theirs).sum() / made.float().square().sum())
        if not self._place("head", "lm_head", made * factor, theirs, extra=dtype).differs:
            return _with(place, detail=f"the trainer's logits are {factor:.4g} times these")
        return _with(place, detail="its weight, bias, or a factor or cap on the logits")

    def _place(
        self,
        kind: str,
        name: str,
        made: Tensor,
        theirs: Tensor,
        detail: str = "",
        extra: torch.dtype | None = None,
    ) -> Place:
        a, b = made.detach().cpu().float(), theirs.float()
        if a.numel() != b.numel():
            told = f"{tuple(b.shape)} there, {tuple(a.shape)} here"
            return Place(
                kind=kind, name=name, difference=float("inf"), noise=0.0, detail=f"shapes: {told}"
            )
        a = a.reshape(b.shape)
        size = float(b.square().mean().sqrt())
        difference = float((a - b).square().mean().sqrt()) / max(size, 1e-20)
        dtypes = (made.dtype, theirs.dtype, self.ours.build.dtype, extra or made.dtype)
        epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
        scale = NOISE.get(kind, MOST)
        noise = max(LEAST, scale * epsilon if epsilon < 1e-5 else min(scale, 8.0) * epsilon)
        return Place(kind=kind, name=name, difference=difference, noise=noise, detail=detail)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.ours.build.dtype)

    def _turn(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ours.rotaries[self.ours.rotary_of[index]](self.batch.positions)

    def _kv(self, index: int) -> tuple[ForwardBatch, LayerKV]:
        pages, chunk = self.pages[index], self.ours.chunk_of[index]
        return within_chunks(self.batch, chunk, BLOCK) if chunk else self.batch, pages


def _with(place: Place, *, detail: str) -> Place:
    return Place(
        kind=place.kind, name=place.name, difference=place.difference, noise=place.noise,
        detail=detail,
    )  # fmt: skip
