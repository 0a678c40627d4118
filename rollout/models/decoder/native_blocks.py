"""All decoder blocks of a step in one native call, of several ranks in two a block."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollout.kernels import batch_invariant_attention, finish_sums, paged_attention
from rollout.kernels.kv_codes import kind_of
from rollout.kernels.linear import cpu as linear
from rollout.kernels.native import entry, library
from rollout.kernels.native.prototypes import structure
from rollout.kernels.paged_attention.cpu import takes_heads
from rollout.models.arch import Arch, BlockNorms
from rollout.models.config.model import ModelConfig
from rollout.models.decoder.blocks import DecoderBlock, GatedMLP
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import Attention
from rollout.models.layers.base import Build
from rollout.models.layers.linear import MergedColumnLinear, QKVLinear, RowLinear
from rollout.models.layers.norm import RMSNorm
from rollout.models.weight_io.table import SCALE
from rollout.weights import TileLayout
from rollout.weights.quantization import SCHEMES

O_BIAS, DOWN_BIAS = 6, 11  # in _weights
ATTENTIONS = (paged_attention, batch_invariant_attention)  # one native code, in one order


class NativeBlocks:
    """Runs the blocks of one instance, with the bits and all-reduces that they have op by op."""

    def __init__(self, build: Build, blocks: Sequence[DecoderBlock]) -> None:
        self._build, config = build, build.config
        attention = _attention(blocks[0])
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scale, self._inner = attention.scale, _mlp(blocks[0]).down.local
        self._window = attention.window
        columns = (2 * self._heads + 2 * self._kv_heads) * config.head_dim
        if config.qk_norm:
            columns += (self._heads + self._kv_heads) * config.head_dim
        self._work_columns = max(self._inner, columns)
        self._weights = [_weights(block) for block in blocks]
        size = build.tp.size
        self._o_segments = attention.o_proj.segments // size if build.deterministic else 1
        self._down_segments = _mlp(blocks[0]).down.segments // size if build.deterministic else 1
        # More ranks than one sum after each half, and add biases to the sum.
        self._biases: list[Tensor | None] = []
        if build.tp.size > 1:
            for weights in self._weights:
                for place in (O_BIAS, DOWN_BIAS):
                    self._biases.append(weights[place])
                    weights[place] = None

    @staticmethod
    def of(build: Build, blocks: Sequence[nn.Module]) -> NativeBlocks | None:
        """For the blocks of one instance, if the native code is made for them: bfloat16 in tiles,
        alike, and nothing in them that somebody replaced or watches."""
        config = build.config
        inner = config.intermediate_size // build.tp.size
        fits = (
            build.device.type == "cpu"
            and build.dtype == torch.bfloat16
            and library() is not None
            and takes_heads(config.num_heads, config.num_kv_heads, config.head_dim)
            and inner % linear.TILE_ROWS == 0
            and len(blocks) > 0
            and _is_like_llama(config)
            and all(_is_plain(block, inner, config.qk_norm) for block in blocks)
        )
        return NativeBlocks(build, cast("Sequence[DecoderBlock]", blocks)) if fits else None

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: Sequence[LayerKV],
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the last block returns for embeddings x [T, hidden], or for what the block before
        made of them; both are overwritten.
        """
        tokens, hidden = x.shape
        # The code reads a sum behind its first half: other stages begin with that of the second.
        first = 0 if residual is None else 2
        x, out = (x, torch.empty_like(x)) if residual is None else (residual, x)
        work = x.new_empty(tokens, self._work_columns)
        cos, sin, slots = cos.contiguous(), sin.contiguous(), batch.slot_mapping.contiguous()
        starts, lengths = batch.query_starts.contiguous(), batch.context_lens.contiguous()
        tables = batch.block_tables.contiguous()
        assert slots.dtype == torch.int64
        assert starts.dtype == lengths.dtype == tables.dtype == torch.int32
        addresses, tp = self._addresses(kv, first), self._build.tp
        in_order = self._build.deterministic and tp.size > 1
        sums = x.new_empty(x.shape, dtype=torch.float32) if in_order else None
        _, _, page, dim = kv[0].k.shape
        problem: Any = structure("Blocks")(
            ctypes.addressof(addresses),
            *(t.data_ptr() for t in (x, out, work, cos, sin, slots, starts, lengths, tables)),
            *(tokens, len(lengths), hidden, self._inner, self._heads, self._kv_heads, dim),
            *(cos.shape[1], page, tables.shape[1], self._window, kind_of(kv[0].k)),
            *(first, first + 2 * len(self._weights)),
            *(None if sums is None else sums.data_ptr(), self._build.config.norm_eps, self._scale),
            *(self._o_segments, self._down_segments),
            *(cos.dtype == torch.float32, linear.level(), torch.get_num_threads()),
        )
        kept, halves = batch.hidden_pages, 2 * len(self._weights)
        if tp.size == 1:
            # In one call, but for what layers read in between that somebody wants to keep.
            at, wanted = 0, () if kept is None else kept.layers
            for stop in sorted({halves, *(2 * layer for layer in wanted)}):
                problem.begin, problem.end, at = first + at, first + stop, stop
                if stop:
                    _run(problem)
                if kept is not None:
                    kept.keep_before(stop // 2, batch, x, out if stop else None)
            return out, x
        for half, bias in enumerate(self._biases):
            if kept is not None and half % 2 == 0:
                kept.keep_before(half // 2, batch, x, out if half else None)
            problem.begin, problem.end = first + half, first + half + 1
            _run(problem)
            if sums is not None:
                finish_sums(tp.tree_sum(sums), bias, out.dtype, out)
                continue
            tp.all_reduce(out)
            if bias is not None:
                out.add_(bias)
        if kept is not None:
            kept.keep_before(halves // 2, batch, x, out)
        return out, x

    def _addresses(self, kv: Sequence[LayerKV], first: int) -> ctypes.Array[ctypes.c_void_p]:
        """Of each block's weights and pages, as they are now: sleep may have moved them; behind
        those of a block that does not run, where ``first`` is not 0.
        """
        found: list[int | None] = []
        for weights, pages in zip(self._weights, kv, strict=True):
            found += [None if t is None else t.data_ptr() for t in weights]
            kept = pages.k, pages.v, pages.k_scales, pages.v_scales
            found += [None if t is None else t.data_ptr() for t in kept]
        if first:
            found[:0] = [None] * (len(found) // len(self._weights))
        return (ctypes.c_void_p * len(found))(*found)


def _run(problem: ctypes.Structure) -> None:
    if entry("decoder_blocks")(ctypes.addressof(problem)):
        raise MemoryError("decoder blocks: no memory for attention's scratch")


def knows(arch: Arch) -> bool:
    """Whether an architecture differs from Llama in nothing that the native code does not know."""
    return (
        arch.norm == "rms"
        and arch.norms == BlockNorms()
        and not arch.parallel
        and not arch.interleaved
        and arch.qk_norm_over == "head"
        and arch.activation[1] == "silu"
        and arch.residual_scale is None
        and arch.attention_softcap is None
        and arch.local_rope is None
        and arch.no_rope is None
        and arch.moe is None
        and arch.latent is None
        and arch.delta is None
        and arch.mamba is None
        and not arch.gated
    )


def _is_like_llama(config: ModelConfig) -> bool:
    """What the file may say, too."""
    layers = config.layers[: config.num_layers]
    return (
        knows(config.arch)
        and config.activation == "silu"
        and all(layer == layers[0] for layer in layers)
        and layers[0].growth is None
        and not layers[0].chunk
    )


def _is_plain(block: nn.Module, inner: int, qk_norm: bool) -> bool:
    """Exactly the modules that the native code stands for, their linears in tiles."""
    if type(block) is not DecoderBlock or type(_mlp(block)) is not GatedMLP:
        return False
    attention, mlp = _attention(block), _mlp(block)
    if type(attention) is not Attention or attention.attend not in ATTENTIONS:
        return False
    if attention.sinks is not None:
        return False
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up, mlp.down)
    norms = [_norm(block, "input_layernorm"), _norm(block, "post_attention_layernorm")]
    for norm in (attention.q_norm, attention.k_norm):
        if (norm is not None) != qk_norm:
            return False
        norms += [] if norm is None else [cast(RMSNorm, norm)]
    layouts = [each.specs["weight"].layout for each in linears]
    return (
        [type(each) for each in linears] == [QKVLinear, RowLinear, MergedColumnLinear, RowLinear]
        and all(type(norm) is RMSNorm for norm in norms)
        and all(isinstance(x, TileLayout) and x.rows == linear.TILE_ROWS for x in layouts)
        and {each.specs["weight"].scheme for each in linears} in ({None}, {SCHEMES["int8"]})
        and mlp.down.local == inner
        and mlp.down.reduce
        and not any(each._forward_hooks or each._forward_pre_hooks for each in block.modules())
    )


def _attention(block: DecoderBlock) -> Attention:
    return cast(Attention, block.self_attn)


def _norm(block: DecoderBlock, name: str) -> RMSNorm:
    return cast(RMSNorm, getattr(block, name))


def _mlp(block: DecoderBlock) -> GatedMLP:
    return cast(GatedMLP, getattr(block, block.mlp_name))


def _weights(block: DecoderBlock) -> list[Tensor | None]:
    """In the order of ``Block`` in native/blocks.c."""
    attention, mlp = _attention(block), _mlp(block)
    q_norm, k_norm = (cast("RMSNorm | None", x) for x in (attention.q_norm, attention.k_norm))
    return [
        _norm(block, "input_layernorm").weight,
        attention.qkv_proj.weight,
        attention.qkv_proj.bias,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        attention.o_proj.weight,
        attention.o_proj.bias,
        _norm(block, "post_attention_layernorm").weight,
        mlp.gate_up.weight,
        mlp.gate_up.bias,
        mlp.down.weight,
        mlp.down.bias,
        *(
            getattr(each, f"weight{SCALE}", None)
            for each in (attention.qkv_proj, attention.o_proj, mlp.gate_up, mlp.down)
        ),
    ]
