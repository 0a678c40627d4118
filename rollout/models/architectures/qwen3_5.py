"""Qwen3.5: three gated delta nets to one layer of gated attention; images and videos, too."""

from dataclasses import replace

from rollout.models.arch import Arch, DeltaArch, MoEArch, SharedArch, VisionArch

_DENSE = Arch(
    norm="rms plus one",
    qk_norm=True,
    mlp_bias=False,
    head_dim_given=True,
    partial_rotary=0.25,
    mrope="interleaved",
    gated=True,
    delta=DeltaArch(),
    prefixes={"mtp.": ""},
)
_MIXED = replace(
    _DENSE,
    mlp_size="moe_intermediate_size",
    moe=MoEArch(
        shared=SharedArch(size="shared_expert_intermediate_size"),
        every_layer=True,
        norm_topk_prob=True,
    ),
)
# Text alone, of whichever class files or a trainer have it.
_TEXT = {"mtp.": "", "model.visual.": "", "model.language_model.": "model."}

Qwen3_5ForCausalLM = replace(_DENSE, mrope=None, prefixes=_TEXT)
Qwen3_5MoeForCausalLM = replace(_MIXED, mrope=None, prefixes=_TEXT)
Qwen3_5ForConditionalGeneration = replace(
    _DENSE, texts={"qwen3_5_text": _DENSE}, vision=VisionArch(kind="qwen3_5")
)
Qwen3_5MoeForConditionalGeneration = replace(
    _MIXED, texts={"qwen3_5_moe_text": _MIXED}, vision=VisionArch(kind="qwen3_5_moe")
)
