"""Qwen-VL: Qwen's text models with images and videos; positions have a time, a row, a column."""

from dataclasses import replace

from rollout.models.arch import MoEArch, VisionArch
from rollout.models.architectures.qwen2 import Qwen2ForCausalLM as _Qwen2
from rollout.models.architectures.qwen3 import Qwen3ForCausalLM as _Qwen3

_TEXT_25 = replace(_Qwen2, mrope="sections")
_TEXT_3 = replace(_Qwen3, mrope="interleaved", rope_theta=5e5, slides=None, sliding_window=None)
_MIXED_3 = replace(_TEXT_3, head_dim_given=False, moe=MoEArch(norm_topk_prob=True))

Qwen2_5_VLForConditionalGeneration = replace(
    _TEXT_25,
    texts={"qwen2_5_vl_text": _TEXT_25},
    vision=VisionArch(kind="qwen2_5_vl", pace="tokens_per_second"),
)
Qwen3VLForConditionalGeneration = replace(
    _TEXT_3,
    texts={"qwen3_vl_text": _TEXT_3},
    vision=VisionArch(kind="qwen3_vl", levels="deepstack_visual_indexes"),
)
Qwen3VLMoeForConditionalGeneration = replace(
    _MIXED_3,
    texts={"qwen3_vl_moe_text": _MIXED_3},
    vision=VisionArch(kind="qwen3_vl_moe", levels="deepstack_visual_indexes"),
)
