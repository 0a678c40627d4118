"""OLMoE: Llama's attention with q and k normalised as whole rows, over experts."""

from rollout.models.arch import Arch, MoEArch

OlmoeForCausalLM = Arch(
    qk_norm=True,
    qk_norm_over="row",
    moe=MoEArch(size="intermediate_size", every_layer=True),
)
