"""All decoder blocks of a step in one native call, where each of their ops would be one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rollout.kernels import paged_attention
from rollout.kernels.linear import cpu as linear
from rollout.kernels.native import entry
from rollout.models.blocks import DecoderBlock, GatedMLP
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import Attention
from rollout.models.layers.base import Build
from rollout.weights import TileLayout

MAX_HEAD_DIM = 256  # MAX_DIM of attention.c
MAX_GROUP = 64  # query heads of a KV head: ROWS there


class _Blocks(ctypes.Structure):
    """``Blocks`` in native/blocks.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("blocks", "residual", "out", "work", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "lengths", "tables")),
        *((name, ctypes.c_int64) for name in ("count", "tokens", "sequences", "hidden", "inner")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "rotary", "page")),
        ("table_width", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_int32) for name in ("wide", "level", "threads")),
    )


class NativeBlocks:
    """Runs the blocks of one instance, with the bits that they give op by op."""

    def __init__(self, build: Build, blocks: Sequence[DecoderBlock]) -> None:
        """``blocks``: such that ``fits``."""
        self._build, config = build, build.config
        attention = blocks[0].self_attn
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scale, self._inner = attention.scale, _mlp(blocks[0]).down_proj.inputs
        columns = (2 * self._heads + 2 * self._kv_heads) * config.head_dim
        if config.qk_norm:
            columns += (self._heads + self._kv_heads) * config.head_dim
        self._work_columns = max(self._inner, columns)
        self._weights = [_weights(block) for block in blocks]

    @staticmethod
    def fits(build: Build, blocks: Sequence[nn.Module]) -> bool:
        """Whether the native code is made for these: bfloat16 in tiles, one rank, and nothing in
        them that somebody replaced."""
        config = build.config
        return (
            build.device.type == "cpu"
            and build.dtype == torch.bfloat16
            and build.tp.size == 1
            and not build.deterministic
            and linear.available()
            and config.head_dim <= MAX_HEAD_DIM
            and config.num_heads <= MAX_GROUP * config.num_kv_heads
            and config.intermediate_size % linear.TILE_ROWS == 0
            and len(blocks) > 0
            and all(_is_plain(block) for block in blocks)
        )

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, kv: Sequence[LayerKV]
    ) -> tuple[Tensor, Tensor]:
        """What the last block returns for embeddings x [T, hidden], which are overwritten."""
        tokens, hidden = x.shape
        out, work = torch.empty_like(x), x.new_empty(tokens, self._work_columns)
        cos, sin, slots = cos.contiguous(), sin.contiguous(), batch.slots.contiguous()
        starts, lengths = batch.query_starts.contiguous(), batch.context_lens.contiguous()
        tables = batch.block_tables.contiguous()
        assert slots.dtype == torch.int64
        assert starts.dtype == lengths.dtype == tables.dtype == torch.int32
        addresses = self._addresses(kv)
        _, _, page, dim = kv[0].k.shape
        problem = _Blocks(
            ctypes.addressof(addresses),
            *(t.data_ptr() for t in (x, out, work, cos, sin, slots, starts, lengths, tables)),
            *(len(self._weights), tokens, len(lengths), hidden, self._inner),
            *(self._heads, self._kv_heads, dim, cos.shape[1], page, tables.shape[1]),
            *(self._build.config.rms_norm_eps, self._scale),
            *(cos.dtype == torch.float32, linear.level(), torch.get_num_threads()),
        )
        if entry("decoder_blocks", "p", "i")(ctypes.addressof(problem)):
            raise MemoryError("decoder blocks: no memory for attention's scratch, 0.5 MB a thread")
        return out, x

    def _addresses(self, kv: Sequence[LayerKV]) -> ctypes.Array[ctypes.c_void_p]:
        """Of each block's weights and pages, as they are now: sleep may have moved them."""
        found = []
        for weights, pages in zip(self._weights, kv, strict=True):
            found += [None if t is None else t.data_ptr() for t in weights]
            found += [pages.k.data_ptr(), pages.v.data_ptr()]
        return (ctypes.c_void_p * len(found))(*found)


def _is_plain(block: nn.Module) -> bool:
    """Exactly the modules that the native code stands for, their linears in tiles."""
    if type(block) is not DecoderBlock or type(_mlp(block)) is not GatedMLP:
        return False
    attention, mlp = block.self_attn, _mlp(block)
    if type(attention) is not Attention or attention.attend is not paged_attention:
        return False
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    layouts = [each.specs["weight"].layout for each in linears]
    return all(isinstance(x, TileLayout) and x.rows == linear.TILE_ROWS for x in layouts)


def _mlp(block: DecoderBlock) -> GatedMLP:
    return cast(GatedMLP, getattr(block, block.feed_forward))


def _weights(block: DecoderBlock) -> list[Tensor | None]:
    """In the order of ``Block`` in native/blocks.c."""
    attention, mlp = block.self_attn, _mlp(block)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return [
        block.input_layernorm.weight,
        attention.qkv_proj.weight,
        attention.qkv_proj.bias,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        attention.o_proj.weight,
        attention.o_proj.bias,
        block.post_attention_layernorm.weight,
        mlp.gate_up_proj.weight,
        mlp.gate_up_proj.bias,
        mlp.down_proj.weight,
        mlp.down_proj.bias,
    ]
