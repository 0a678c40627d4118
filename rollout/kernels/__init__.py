"""Ops of the forward pass, of digests and deltas: plain torch, with faster ones beside it."""

from rollout.kernels.add_rms_norm import add_rms_norm
from rollout.kernels.digest import digest
from rollout.kernels.draw_tokens import draw_tokens
from rollout.kernels.exchange import exchange
from rollout.kernels.filter_logits import filter_logits
from rollout.kernels.fused_experts import fused_experts
from rollout.kernels.gap_codes import decode_gaps, encode_gaps
from rollout.kernels.gated_linear import gated_linear
from rollout.kernels.linear import linear
from rollout.kernels.ordered_attention import ordered_attention
from rollout.kernels.ordered_linear import ordered_linear
from rollout.kernels.paged_attention import paged_attention
from rollout.kernels.patch_places import patch_places
from rollout.kernels.rms_norm import rms_norm
from rollout.kernels.rotary import rotary
from rollout.kernels.rotary_store import rotary_store
from rollout.kernels.scan_logits import scan_logits
from rollout.kernels.silu_mul import silu_mul
from rollout.kernels.store_kv import store_kv
from rollout.kernels.stream_copy import stream_copy
from rollout.kernels.take_changes import take_changes
from rollout.kernels.write_box import write_box

__all__ = [
    "add_rms_norm",
    "decode_gaps",
    "digest",
    "draw_tokens",
    "encode_gaps",
    "exchange",
    "filter_logits",
    "fused_experts",
    "gated_linear",
    "linear",
    "ordered_attention",
    "ordered_linear",
    "paged_attention",
    "patch_places",
    "rms_norm",
    "rotary",
    "rotary_store",
    "scan_logits",
    "silu_mul",
    "store_kv",
    "stream_copy",
    "take_changes",
    "write_box",
]
