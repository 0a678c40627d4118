"""Granite: Llama with factors on embeddings, attention, residual and logits."""

from rollout.models.arch import Arch, Scale

GraniteForCausalLM = Arch(
    embedding_scale=Scale("embedding_multiplier", 1.0),
    attention_scale=Scale("attention_multiplier", 1.0),
    residual_scale=Scale("residual_multiplier", 1.0),
    logits_scale=Scale("logits_scaling", 1.0, power=-1.0),
)
