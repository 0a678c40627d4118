"""OLMo 2 and 3: norms after each half alone, and of q and k as whole rows."""

from dataclasses import replace

from rollout.models.arch import Arch, BlockNorms

Olmo2ForCausalLM = Arch(
    mlp_bias=False,
    norm="rms wide",
    norms=BlockNorms(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    qk_norm=True,
    qk_norm_over="row",
    wide_rope=True,
)
Olmo3ForCausalLM = replace(
    Olmo2ForCausalLM,
    slides="typed",
    sliding_window=4096,
    full_every=4,
    rope_theta=5e5,
    local_rope=("rope_theta", 5e5),
)
