"""OLMo-Hybrid: three gated delta nets to one layer of attention, which may have no positions."""

from dataclasses import replace

from rollout.models.arch import BlockNorms, DeltaArch
from rollout.models.architectures import olmo

OlmoHybridForCausalLM = replace(
    olmo.Olmo2ForCausalLM,
    no_rope="baseless",
    norms=replace(  # as transformers writes it; in memory and in older files it is as OLMo 2's
        olmo.Olmo2ForCausalLM.norms, after_attention="feedforward_layer_norm"
    ),
    norms_beside=BlockNorms(
        before_attention="attention_layer_norm", before_mlp="feedforward_layer_norm"
    ),
    delta=DeltaArch(apart=True, doubled=("linear_allow_neg_eigval", True), norm_eps=1e-5),
)
