"""What sets one architecture apart from the others that the same blocks build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout.weights.fused_experts import PROJ_NAMES, ExpertNames

# Always so; or the field of config.json that says, and what holds where the file does not have it.
Switch = bool | tuple[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedArch:
    """The expert that every token passes: the submodule ``name``.

    ``size``: the field of its inner size; times the field ``count``, where one is named.
    ``gated``: behind a sigmoid gate, the submodule ``<name>_gate``.
    """

    size: str
    count: str | None = None
    name: str = "shared_expert"
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedArch:
    """All experts of a layer in two tensors, in files too.

    ``gate_up_proj`` [experts, hidden, 2 inner] and ``down_proj`` [experts, inner, hidden].

    ``interleaved``: columns of the first alternate between gate and up, instead of gate's before
    up's. ``bias``: both have one. ``clamped``: fields of alpha and limit, and their defaults; see
    ``rollout.kernels.fused_experts``.
    """

    interleaved: bool = False
    bias: bool = False
    clamped: tuple[tuple[str, float], tuple[str, float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEArch:
    """The experts of an architecture. Strings are fields of ``config.json``, sizes of one expert.

    ``stacked``: they are not one by one in files. ``router``: the submodule that scores them.

    Which layers are sparse: ``every_layer``, there is no ``decoder_sparse_step`` and no
    ``mlp_only_layers``; ``first_dense``, the field that counts dense layers before the others.

    Routing: ``scores`` are made of the router's logits (computed in float32 where
    ``wide_router``). ``score_bias``: a trained bias on the choice alone, which is no parameter to
    transformers but a buffer, ``e_score_correction_bias`` in the "gate" or beside it in the
    "block". ``groups``: the choice is within the ``topk_group`` best of ``n_group`` groups, each
    as good as its best expert ("max") or its best two ("top2"), unless the file's ``topk_method``
    is greedy. ``norm_topk_prob`` None: the field of that name says. ``scaled``: weights are
    multiplied by ``routed_scaling_factor``. ``wide_weights``: they stay float32 instead of being
    rounded to the model's dtype.
    """

    names: ExpertNames = PROJ_NAMES
    stacked: StackedArch | None = None
    router: str = "gate"
    router_bias: bool = False
    count: str = "num_experts"
    size: str = "moe_intermediate_size"
    shared: SharedArch | None = None
    every_layer: bool = False
    first_dense: str | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    score_bias: Literal["gate", "block"] | None = None
    groups: Literal["max", "top2"] | None = None
    norm_topk_prob: bool | None = None
    scaled: bool = False
    wide_router: bool = False
    wide_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentArch:
    """Latent attention; its sizes have one name everywhere.

    ``interleaved``: the dimensions of a head that turn together are neighbours in the file,
    instead of half of the turned part apart.
    """

    interleaved: Switch = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture, declared in a file of ``architectures/`` under its Hugging Face name.

    The defaults are Llama's; they also are what is read for a model class from elsewhere.
    ``head_dim_given``: the file must name it (else hidden size over heads is its default).
    ``rope_theta``: where the file has none. ``always_slides``: a ``sliding_window`` holds wherever
    one is set, and ``sliding_window`` where the file says nothing; else ``use_sliding_window``
    switches it on. ``next_layers``: the field that counts layers which predict further tokens: a
    checkpoint has them behind the others, and nothing here takes them. ``partial_rotary``:
    ``partial_rotary_factor`` holds where positions are not scaled, too.
    """

    qkv_bias: Switch = ("attention_bias", False)
    o_bias: Switch = ("attention_bias", False)
    mlp_bias: Switch = ("mlp_bias", False)
    qk_norm: Switch = False
    head_dim_given: bool = False
    rope_theta: float = 1e4
    always_slides: bool = False
    sliding_window: int | None = None
    next_layers: str | None = None
    partial_rotary: bool = False
    latent: LatentArch | None = None
    moe: MoEArch | None = None
