"""Ops of the forward pass, of digests and deltas: plain torch, with faster ones beside it."""

from rollout.kernels.add_rms_norm import add_rms_norm
from rollout.kernels.batch_invariant_linear import (
    batch_invariant_linear,
    finish_sums,
    segment_sums,
)
from rollout.kernels.causal_conv import causal_conv
from rollout.kernels.copy_into_box import copy_into_box
from rollout.kernels.copy_regions import copy_regions
from rollout.kernels.copy_slots import copy_slots
from rollout.kernels.dequantize import dequantize
from rollout.kernels.diff_update import diff_update
from rollout.kernels.digest import digest
from rollout.kernels.digest_cells import digest_cells
from rollout.kernels.digest_regions import DigestedAs, digest_regions
from rollout.kernels.filter_logits import filter_logits
from rollout.kernels.fused_experts import fused_experts
from rollout.kernels.gap_codes import decode_gaps, encode_gaps
from rollout.kernels.gated_delta_rule import gated_delta_rule
from rollout.kernels.gated_linear import gated_linear
from rollout.kernels.linear import linear
from rollout.kernels.lora_linear import lora_linear
from rollout.kernels.nontemporal_copy import nontemporal_copy
from rollout.kernels.norm_rope_and_cache import norm_rope_and_cache
from rollout.kernels.paged_attention import batch_invariant_attention, paged_attention
from rollout.kernels.quantize import quantize
from rollout.kernels.quantized_experts import quantized_experts
from rollout.kernels.quantized_linear import quantized_linear
from rollout.kernels.rms_norm import rms_norm
from rollout.kernels.rope_and_cache import rope_and_cache
from rollout.kernels.sample import sample
from rollout.kernels.scan_logits import scan_logits
from rollout.kernels.scatter_indices import scatter_indices
from rollout.kernels.select_tokens import select_tokens
from rollout.kernels.silu_mul import silu_mul
from rollout.kernels.ssd_scan import ssd_scan
from rollout.kernels.swap_tensors import swap_tensors

__all__ = [
    "DigestedAs",
    "add_rms_norm",
    "batch_invariant_attention",
    "batch_invariant_linear",
    "causal_conv",
    "copy_into_box",
    "copy_regions",
    "copy_slots",
    "decode_gaps",
    "dequantize",
    "diff_update",
    "digest",
    "digest_cells",
    "digest_regions",
    "encode_gaps",
    "filter_logits",
    "finish_sums",
    "fused_experts",
    "gated_delta_rule",
    "gated_linear",
    "linear",
    "lora_linear",
    "nontemporal_copy",
    "norm_rope_and_cache",
    "paged_attention",
    "quantize",
    "quantized_experts",
    "quantized_linear",
    "rms_norm",
    "rope_and_cache",
    "sample",
    "scan_logits",
    "scatter_indices",
    "segment_sums",
    "select_tokens",
    "silu_mul",
    "ssd_scan",
    "swap_tensors",
]
