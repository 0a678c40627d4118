"""What sets one architecture apart from the others that the same blocks build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollout.weights.expert_names import PROJ_NAMES, ExpertNames

# Always so; or the field of config.json that says, and what holds where the file does not have it.
Switch = bool | tuple[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedArch:
    """The expert that every token passes: the submodule ``name``.

    ``size``: the field of its inner size; times the field ``count``, where one is named.
    ``gated``: behind a sigmoid gate, the submodule ``<name>_gate``. ``beside``: it stands beside
    the experts' module, not within it.
    """

    size: str
    count: str | None = None
    name: str = "shared_expert"
    gated: bool = True
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedArch:
    """All experts of a layer in two tensors, in files too.

    ``gate_up_proj`` [experts, hidden, 2 inner] and ``down_proj`` [experts, inner, hidden].

    ``interleaved``: columns of the first alternate between gate and up, instead of gate's before
    up's. ``rows``: names of two others beside the module, ``[experts, 2 inner, hidden]`` and
    ``[experts, hidden, inner]``. ``bias``: both have one. ``clamped``: fields of alpha and limit,
    and their defaults; see ``rollout.kernels.fused_experts``. ``alone_in``: the scheme in which
    releases have the experts and no other linear, "" where there is none.
    """

    interleaved: bool = False
    rows: tuple[str, str] | None = None
    bias: bool = False
    clamped: tuple[tuple[str, float], tuple[str, float]] | None = None
    alone_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEArch:
    """The experts of an architecture. Strings are fields of ``config.json``, sizes of one expert.

    ``stacked``: they are not one by one in files. ``router``: the submodule that scores them.
    ``narrow``: the field of what experts read and write in the place of hidden states, between the
    block's ``fc1_latent_proj`` and ``fc2_latent_proj``, where it has one. ``optional``: where
    ``count`` is 0 there are none, and all layers are dense.

    Which layers are sparse: ``every_layer``, there is no ``decoder_sparse_step`` and no
    ``mlp_only_layers``; ``first_dense``, the field that counts dense layers before the others;
    ``sparse_step``, the field that says each how many-th; ``sparse_layers``, one that lists them.

    Routing: ``scores`` are made of the router's logits (computed in float32 where ``wide_router``);
    "mixer": each choice by a softmax of its own, over the experts whose logit is near to the best's
    (``router_jitter_noise``). ``score_bias``: a trained bias on the choice alone, which is no
    parameter to transformers but a buffer, ``e_score_correction_bias`` in the "gate" or beside it
    in the "block". ``groups``: the choice is within the ``topk_group`` best of ``n_group`` groups,
    each as good as its best expert ("max", unless ``topk_method`` is greedy, its default) or its
    best two ("top2"). ``norm_topk_prob`` None: the field of that name says. ``scaled``: weights are
    multiplied by ``routed_scaling_factor``. ``scaled_inputs``: they multiply what an
    expert reads, instead of what it makes. ``wide_weights``: they stay float32 instead of being
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
    optional: bool = False
    narrow: str | None = None
    first_dense: str | None = None
    sparse_step: str = "decoder_sparse_step"
    sparse_layers: str | None = None
    scores: Literal["softmax", "sigmoid", "mixer"] = "softmax"
    score_bias: Literal["gate", "block"] | None = None
    groups: Literal["max", "top2"] | None = None
    norm_topk_prob: bool | None = None
    scaled: bool = False
    scaled_inputs: bool = False
    wide_router: bool = False
    wide_weights: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor: the ``field`` of ``config.json`` (``default`` where it has none), to a ``power``.

    ``rounded``: to the model's dtype, before it multiplies.
    """

    field: str
    default: float | None = None
    power: float = 1.0
    rounded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNorms:
    """The norms of a block, as the checkpoint calls them; None where there is none.

    Those ``before`` a half normalise its input; those ``after`` it, what it adds to the residual.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexArch:
    """An index of keys chooses the tokens that a query attends to.

    ``interleaved``: as of ``LatentArch``, in its queries and keys. ``shared``: some layers have
    none, and attend to what an earlier one chose.
    """

    interleaved: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentArch:
    """Latent attention; its sizes have one name everywhere.

    ``interleaved``: the dimensions of a head that turn together are neighbours in the file,
    instead of half of the turned part apart. ``index``: of sparse attention.
    """

    interleaved: Switch = True
    index: IndexArch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionArch:
    """What encodes images and videos: transformers' own module, under the name ``visual``.

    ``kind``: the ``model_type`` of the whole config. ``levels``: the field of ``vision_config``
    that lists blocks of the tower whose outputs are added behind the text model's first blocks.
    ``pace``: the field of ``vision_config`` that says how much positions rise in a second of a
    video, which lies in the prompt whole; None: it lies there frame by frame, each behind its time.
    """

    kind: str
    levels: str | None = None
    pace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaArch:
    """Gated delta nets in the layers that ``layer_types`` calls linear; their sizes have one name
    everywhere.

    ``fused``: files have all projections in two tensors, head by head, ``in_proj_qkvz`` and
    ``in_proj_ba``, instead of part by part in four. ``apart``: queries, keys and values have a
    projection and a convolution each, and the norm and projection behind are ``o_norm``, of its own
    ``norm_eps`` where that is one, and ``o_proj``. ``by_row``: of those, each row of a state decays
    by itself, and the gates in front of both are of low rank. ``doubled``: what is learnt of a
    token goes to twice, so that a state may swing.
    """

    name: str = "linear_attn"
    fused: bool = False
    apart: bool = False
    by_row: bool = False
    doubled: Switch = False
    norm_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaArch:
    """Mamba-2 in the layers that files call mamba: the fields of its sizes.

    ``least_step``: the field of the least step of a token, in the place of ``time_step_limit``.
    ``beside``: every layer attends, too; both read its one norm, and are added. ``inner``: the
    field of heads times their size, which else is of the hidden size. ``out_bias``: of the last
    projection, where that differs. ``normed``: there is a norm behind the scan; ``norm_first``: of
    what comes before the gate. ``scales``: fields of the factors on what a layer reads and makes,
    and the list of those on the parts of its first projection.
    """

    heads: str = "mamba_n_heads"
    dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    conv_bias: Switch = ("mamba_conv_bias", True)
    bias: Switch = ("mamba_proj_bias", False)
    least_step: str | None = None
    beside: bool = False
    inner: str | None = None
    out_bias: Switch | None = None
    normed: Switch = True
    norm_first: Switch = False
    scales: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture, declared in a file of ``architectures/`` under its Hugging Face name.

    The defaults are Llama's; they also are what is read for a model class from elsewhere. A pair
    is a field of ``config.json`` and what holds where the file does not have it.

    Linears: the biases; ``fused_qkv``, ``fused_gate_up``: the checkpoint has one tensor for all.
    ``mlp``: the name of a dense feed-forward, ``mlp_linears`` of what it has, ``mlp_size`` the
    field of its size, ``activation`` of its gate. ``head_dim_given``: the file must name it (else
    hidden size over heads is its default). ``tied`` where the file says nothing.

    ``squared``: feed-forwards, experts too, are down(relu(up)^2). ``lone``: a layer is attention,
    what stands in its place, an MLP or experts, the ``mixer`` behind one ``norm``. ``embedding``,
    ``last_norm``: names of what stands before and behind the layers.

    Norms: ``norm`` is "rms" (rounded, then multiplied by the weight), "rms wide" (multiplied in
    float32), "rms plus one" (the same by 1 + weight) or "layer" (the mean is subtracted, too);
    ``norm_bias``: plus a bias (of "layer"); ``norm_eps`` its field. ``head_bias``: the head has
    one. ``qk_norm``: q and k are normalised, ``qk_norm_over`` each "head" by one weight, each of
    the "heads" by its own, the whole "row", or heads that are "turned", by none. ``norms``: where a
    block has which; ``norms_beside``, where its layer carries a state instead. ``parallel``: both
    halves of a block read its one norm, and are added together.

    Factors on the embeddings, on q k^T (default: head_dim^-0.5), on keys alone, on what a half adds
    to the residual, and on the logits; fields of those on what attention reads and makes
    (``attention_ends``) and a list of those on the gate and on what a feed-forward makes
    (``mlp_scales``); caps on q k^T and on the logits. ``sinks``: a trained score of each
    head takes part in its softmax and has no value.

    Windows: layers may see ``sliding_window`` keys (that many where the file has no such field),
    where ``switched`` only if ``use_sliding_window`` is on. ``slides`` "always": all of them; else
    those that ``layer_types`` says, and where the file has none, "typed": all but each
    ``full_every``-th (0: all), "late": those from ``max_window_layers`` on, "early": each second of
    those before it, "unturned": those without positions. ``chunked``: in layers that turn, a query
    sees the keys of its own chunk of ``attention_chunk_size`` alone.

    Positions: ``rope_theta`` where the file has none. ``rope_told``: it must have rope parameters,
    which else are scaled ones of transformers. ``longrope``: rope that files call "yarn" is of that
    kind, and scaled beyond so many positions where the top of the file does not say.
    ``local_rope``: (field, base) of layers that slide, whose positions are never scaled.
    ``no_rope``: not in layers that ``no_rope_layers`` has as 0 ("listed"), not in those that do not
    slide ("full"), in none where ``position_embedding_type`` is not "rope" ("untold"), in none
    where the rope parameters have no base ("baseless"), or in none at all ("all"). ``interleaved``:
    the pairs that turn are neighbours. ``partial_rotary``: ``partial_rotary_factor`` holds where
    positions are not scaled, too, and is this where there is none (nor a ``rotary_dim``).
    ``wide_rope``: cos and sin stay float32. ``grown``: queries that are not turned grow with their
    position, unless ``attn_temperature_tuning`` is off. ``mrope``: a position has a time, a row and
    a column, each turning ``mrope_section`` of a head's pairs, one after the other or
    "interleaved".

    ``gated``: ``q_proj`` has a gate behind each head, whose sigmoid multiplies what it attends to.

    ``next_layers``: the field that counts layers which predict further tokens: a checkpoint has
    them behind the others, and an ``MTPHead`` alone takes the first. ``prefixes``: what names
    of files and trainers may begin with (``weights.names.placed``). ``texts``: it is the text model
    within a multimodal one, what the ``model_type`` of its ``text_config`` says. ``vision``:
    images, too.

    ``fields``: what its files call a field that others call otherwise.
    """

    qkv_bias: Switch = ("attention_bias", False)
    o_bias: Switch = ("attention_bias", False)
    mlp_bias: Switch = ("mlp_bias", False)
    mlp: str = "mlp"
    mlp_size: str = "intermediate_size"
    mlp_linears: tuple[str, str] = ("gate_up_proj", "down_proj")
    fused_qkv: bool = False
    fused_gate_up: bool = False
    squared: bool = False
    lone: bool = False
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    activation: tuple[str, str] = ("hidden_act", "silu")
    head_dim_given: bool = False
    tied: bool = False
    norm: Literal["rms", "rms wide", "rms plus one", "layer"] = "rms"
    norm_bias: bool = False
    head_bias: Switch = False
    norm_eps: str = "rms_norm_eps"
    norms: BlockNorms = BlockNorms()
    norms_beside: BlockNorms | None = None
    parallel: bool = False
    qk_norm: Switch = False
    qk_norm_over: Literal["head", "heads", "row", "turned"] = "head"
    embedding_scale: Scale | None = None
    attention_scale: Scale | None = None
    key_scale: Scale | None = None
    attention_ends: tuple[str, str] | None = None
    mlp_scales: str | None = None
    residual_scale: Scale | None = None
    logits_scale: Scale | None = None
    attention_softcap: tuple[str, float | None] | None = None
    logits_softcap: tuple[str, float | None] | None = None
    sinks: bool = False
    slides: Literal["always", "typed", "late", "early", "unturned"] | None = None
    switched: bool = False
    sliding_window: int | None = None
    full_every: int | tuple[str, int] = 0
    chunked: bool = False
    rope_theta: float = 1e4
    rope_told: bool = False
    longrope: int | None = None
    local_rope: tuple[str, float] | None = None
    no_rope: Literal["listed", "full", "untold", "baseless", "all"] | None = None
    interleaved: bool = False
    partial_rotary: float | None = None
    wide_rope: bool = False
    grown: bool = False
    mrope: Literal["sections", "interleaved"] | None = None
    next_layers: str | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    latent: LatentArch | None = None
    delta: DeltaArch | None = None
    mamba: MambaArch | None = None
    gated: bool = False
    moe: MoEArch | None = None
    texts: Mapping[str, Arch] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    vision: VisionArch | None = None
