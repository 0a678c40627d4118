"""A trainer's forward pass by the ops that an engine with ``deterministic=True`` runs.

Its logprobs are then the rollout's, bit for bit, as long as the weights are the same: "true
on-policy", with an importance ratio of exactly 1. For transformers' decoders on a CPU, mixtures of
experts among them.
"""

from rollout.trainer_ops.logprobs import logprobs_of, token_logprobs
from rollout.trainer_ops.patch import Patch, patch

__all__ = ["patch", "Patch", "token_logprobs", "logprobs_of"]
