"""Command-R: one norm with a mean for both halves, neighbours turn, logits have a factor."""

from dataclasses import replace

from rollout.models.arch import Arch, BlockNorms, Scale

CohereForCausalLM = Arch(
    mlp_bias=False,
    tied=True,
    norm="layer",
    norm_eps="layer_norm_eps",
    norms=BlockNorms(before_mlp=None),
    parallel=True,
    qk_norm=("use_qk_norm", False),
    qk_norm_over="heads",
    interleaved=True,
    rope_theta=5e5,
    logits_scale=Scale("logit_scale", 0.0625),
)
Cohere2ForCausalLM = replace(
    CohereForCausalLM,
    qk_norm=False,
    slides="typed",
    sliding_window=4096,
    full_every=("sliding_window_pattern", 4),
    no_rope="full",
    rope_theta=1e4,
)
