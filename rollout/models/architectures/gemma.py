"""Gemma: norms by 1 + weight, embeddings by the root of their size, a gelu gate, a tied head."""

from dataclasses import replace

from rollout.models.arch import Arch, BlockNorms, Scale

EMBEDDING_SCALE = Scale("hidden_size", power=0.5, rounded=True)
QUERY_SCALE = Scale("query_pre_attn_scalar", 256.0, power=-0.5)
SANDWICH = BlockNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

GemmaForCausalLM = Arch(
    mlp_bias=False,
    head_dim_given=True,
    tied=True,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    norm="rms plus one",
    embedding_scale=EMBEDDING_SCALE,
)
Gemma2ForCausalLM = replace(
    GemmaForCausalLM,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    norms=SANDWICH,
    attention_scale=QUERY_SCALE,
    attention_softcap=("attn_logit_softcapping", 50.0),
    logits_softcap=("final_logit_softcapping", 30.0),
    slides="typed",
    sliding_window=4096,
    full_every=2,
)
Gemma3ForCausalLM = replace(
    GemmaForCausalLM,
    activation=Gemma2ForCausalLM.activation,
    norms=SANDWICH,
    qk_norm=True,
    attention_scale=QUERY_SCALE,
    logits_softcap=("final_logit_softcapping", None),
    slides="typed",
    sliding_window=4096,
    full_every=("sliding_window_pattern", 6),
    rope_theta=1e6,
    local_rope=("rope_local_base_freq", 1e4),
)
Gemma3ForConditionalGeneration = replace(
    Gemma3ForCausalLM, texts={"gemma3_text": Gemma3ForCausalLM}
)
