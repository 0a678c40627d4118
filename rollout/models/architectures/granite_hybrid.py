"""Granite 4: Mamba-2 with attention now and then, factors, experts beside a dense MLP."""

from dataclasses import replace

from rollout.models.arch import MambaArch, MoEArch, SharedArch, StackedArch
from rollout.models.architectures import granite
from rollout.weights.expert_names import W123_NAMES

GraniteMoeHybridForCausalLM = replace(
    granite.GraniteForCausalLM,
    no_rope="untold",
    mlp="shared_mlp",
    mlp_size="shared_intermediate_size",
    mlp_linears=("input_linear", "output_linear"),
    mlp_bias=False,
    fused_gate_up=True,
    mamba=MambaArch(),
    moe=MoEArch(
        names=W123_NAMES,
        stacked=StackedArch(rows=("input_linear", "output_linear")),
        router="router.layer",
        count="num_local_experts",
        size="intermediate_size",
        shared=SharedArch(
            size="shared_intermediate_size", name="shared_mlp", gated=False, beside=True
        ),
        every_layer=True,
        optional=True,
        norm_topk_prob=True,
    ),
)
