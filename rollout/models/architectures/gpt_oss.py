"""gpt-oss: sinks, windows in every other layer, and stacked experts with biases."""

from rollout.models.arch import Arch, MoEArch, StackedArch

GptOssForCausalLM = Arch(
    qkv_bias=("attention_bias", True),
    o_bias=("attention_bias", True),
    norm="rms wide",
    sinks=True,
    slides="typed",
    sliding_window=128,
    full_every=2,
    rope_theta=1.5e5,
    rope_told=True,
    moe=MoEArch(
        stacked=StackedArch(
            interleaved=True,
            bias=True,
            clamped=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
            alone_in="mxfp4",
        ),
        router="router",
        router_bias=True,
        count="num_local_experts",
        size="intermediate_size",
        every_layer=True,
        norm_topk_prob=True,
    ),
)
