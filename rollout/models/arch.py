"""What sets one architecture apart from the others that the same blocks build."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.weights.fused_experts import PROJ_NAMES, ExpertNames

# Always so; or the field of config.json that says, and what holds where the file does not have it.
Switch = bool | tuple[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEArch:
    """The experts of an architecture. Strings are fields of ``config.json``, sizes of one expert.

    ``norm_topk_prob`` None: the field of that name says. ``every_layer``: there is no
    ``decoder_sparse_step`` and no ``mlp_only_layers``. ``wide_weights``: routing weights stay
    float32 instead of being rounded to the model's dtype.
    """

    names: ExpertNames = PROJ_NAMES
    count: str = "num_experts"
    size: str = "moe_intermediate_size"
    shared_size: str | None = None
    norm_topk_prob: bool | None = None
    every_layer: bool = False
    wide_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture, declared in a file of ``architectures/`` under its Hugging Face name.

    The defaults are Llama's; they also are what is read for a model class from elsewhere.
    ``head_dim_given``: the file must name it (else hidden size over heads is its default).
    ``rope_theta``: where the file has none. ``always_slides``: a ``sliding_window`` holds wherever
    one is set, and ``sliding_window`` where the file says nothing; else ``use_sliding_window``
    switches it on.
    """

    qkv_bias: Switch = ("attention_bias", False)
    o_bias: Switch = ("attention_bias", False)
    mlp_bias: Switch = ("mlp_bias", False)
    qk_norm: bool = False
    head_dim_given: bool = False
    rope_theta: float = 1e4
    always_slides: bool = False
    sliding_window: int | None = None
    moe: MoEArch | None = None
