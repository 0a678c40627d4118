"""GLM-4.5 and 4.6: a part of each head turns; DeepSeek-V3's experts."""

from rollout.models.arch import Arch
from rollout.models.architectures.deepseek_v3 import MOE

Glm4MoeForCausalLM = Arch(
    o_bias=False,
    mlp_bias=False,
    qk_norm=("use_qk_norm", False),
    partial_rotary=0.5,
    next_layers="num_nextn_predict_layers",
    moe=MOE,
)
