"""SmolLM3: Llama in which every fourth layer has no positions."""

from rollout.models.arch import Arch

SmolLM3ForCausalLM = Arch(
    rope_theta=2e6, tied=True, no_rope="listed", slides="unturned", switched=True
)
