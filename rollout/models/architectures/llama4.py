"""Llama 4, text alone: chunks in layers that turn, one expert of many, fed by its own weight."""

from dataclasses import replace

from rollout.models.arch import Arch, MoEArch, SharedArch, StackedArch
from rollout.weights.expert_names import ExpertNames

Llama4ForCausalLM = Arch(
    mlp_bias=False,
    mlp="feed_forward",
    mlp_size="intermediate_size_mlp",
    qk_norm=("use_qk_norm", True),
    qk_norm_over="turned",
    no_rope="listed",
    interleaved=True,
    wide_rope=True,
    rope_theta=5e5,
    chunked=True,
    grown=True,
    moe=MoEArch(
        names=ExpertNames("gate_proj", "up_proj", "down_proj", "feed_forward", "feed_forward"),
        stacked=StackedArch(),
        router="router",
        count="num_local_experts",
        size="intermediate_size",
        shared=SharedArch(size="intermediate_size", gated=False),
        sparse_step="interleave_moe_layer_step",
        sparse_layers="moe_layers",
        scores="sigmoid",
        norm_topk_prob=False,
        scaled_inputs=True,
    ),
)
Llama4ForConditionalGeneration = replace(
    Llama4ForCausalLM, texts={"llama4_text": Llama4ForCausalLM}
)
