"""DeepSeek-V3.2, GLM-5: latent attention to the tokens that an index of keys chooses, experts."""

from dataclasses import replace

from rollout.models.arch import IndexArch, LatentArch
from rollout.models.architectures.deepseek_v3 import DeepseekV3ForCausalLM as _DeepseekV3

DeepseekV32ForCausalLM = replace(_DeepseekV3, latent=LatentArch(index=IndexArch()))
GlmMoeDsaForCausalLM = replace(
    _DeepseekV3, latent=LatentArch(index=IndexArch(interleaved=True, shared=True))
)
