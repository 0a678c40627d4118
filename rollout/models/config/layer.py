"""How each layer attends: how far back, and how positions turn its queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.errors import ConfigError
from rollout.models.arch import Arch
from rollout.models.config.reader import Reader

# How positions may be scaled -> what the file must say then.
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
# Other names of kinds. Of mrope's three positions text has one, three times.
ROPE_ALIASES = {"su": "longrope", "mrope": "default"}
# What rope parameters may hold that is no parameter of transformers' functions.
NO_SCALING = ("type", "rope_type", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
# transformers' own, of a file without them; of heads of 128.
MROPE_SECTIONS = {"sections": (16, 24, 24), "interleaved": (24, 20, 20)}
CHUNK = 8192  # transformers' own, of a file without it
BORDER = 28  # of max_window_layers, as well
SLIDES, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
LINEAR = "linear_attention"
FEEDS: tuple[Literal["mlp", "moe"], ...] = ("mlp", "moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary parameters, from either form of ``config.json``.

    ``partial`` is the rotated share of a head. ``scaling``: the parameters of a kind other than
    "default", under transformers' names. The kind "none" turns nothing. ``axes``: which of three
    positions (time, row, column) turns each pair of a head; empty where there is but one position.
    """

    kind: str
    theta: float = 1e4
    partial: float = 1.0
    scaling: Mapping[str, Any] = field(default_factory=dict)
    axes: tuple[int, ...] = ()

    def differs_up_to(self, max_len: int) -> int:
        """The length in tokens up to which transformers turns a sequence by other frequencies than
        an engine that admits ``max_len`` tokens, which chooses once (``layers/rotary.py``); else 0.
        """
        if self.kind != "longrope":  # "dynamic" acts beyond what any engine admits
            return 0
        original = int(self.scaling["original_max_position_embeddings"])
        return original if max_len > original else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries are multiplied by ``1 + beta * log(1 + (position + ahead) // period)``."""

    beta: float
    period: int
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The attention of one layer; ``window``: the keys a query sees, itself included, 0 for all.

    ``chunk``: of the positions it sees those since the last multiple of that; 0 for all.
    ``recurrent``: it does not attend, but carries a state from token to token; or, where
    ``beside``, does both. ``feeds``: it is a
    feed-forward alone, and keeps nothing.
    """

    window: int
    rope: RopeConfig
    chunk: int = 0
    growth: QueryGrowth | None = None
    recurrent: bool = False
    beside: bool = False
    feeds: Literal["mlp", "moe"] | None = None


def read_layers(read: Reader, arch: Arch) -> tuple[LayerConfig, ...]:
    """Every layer's attention, in their order."""
    types = _read_types(read, arch)
    window = 0 if SLIDES not in types else read.count("sliding_window", arch.sliding_window)
    ropes = {kind: _read_rope(read, arch, kind) for kind in dict.fromkeys(types)}
    turns = _turning(read, arch, len(types))
    chunk = read.count("attention_chunk_size", CHUNK) if CHUNKED in types else 0
    every, growth = _read_growth(read, arch)
    beside = arch.mamba is not None and arch.mamba.beside
    return tuple(
        LayerConfig(
            window=window if kind == SLIDES else 0,
            rope=ropes[kind] if turn else RopeConfig(kind="none"),
            chunk=chunk if kind == CHUNKED else 0,
            growth=growth if every or not turn else None,
            recurrent=kind == LINEAR or beside,
            beside=beside,
            feeds=next((feeds for feeds in FEEDS if feeds == kind), None),
        )
        for kind, turn in zip(types, turns, strict=True)
    )


def _read_growth(read: Reader, arch: Arch) -> tuple[bool, QueryGrowth | None]:
    """Whether queries grow in every layer, and how: Llama 4's, or where rope parameters have it."""
    if arch.grown:
        if not read.values.get("attn_temperature_tuning", True):
            return False, None
        period = read.count("floor_scale")
        return False, QueryGrowth(beta=read.number("attn_scale"), period=period, ahead=1)
    given = read.mapping("rope_parameters") or read.mapping("rope_scaling")
    beta = given.get("llama_4_scaling_beta")
    if beta is None:
        return True, None
    inner = Reader(given, read.file)
    period = inner.count("original_max_position_embeddings")
    return True, QueryGrowth(beta=inner.number("llama_4_scaling_beta"), period=period)


def _read_types(read: Reader, arch: Arch) -> list[str]:
    """``sliding_attention``, ``chunked_attention`` or ``full_attention`` of each layer."""
    values, layers = read.values, read.count("num_hidden_layers")
    given = values.get("layer_types")
    if isinstance(given, list) and len(given) != layers:
        raise ConfigError(
            f"{read.file}: num_hidden_layers is {layers}, but layer_types names {len(given)} "
            "layers; make them agree"
        )
    if arch.mamba is not None and arch.mamba.beside:
        return [FULL] * layers
    if arch.mamba is not None:
        return _known(read, LINEAR, FULL, *(FEEDS if arch.lone else ()))
    if arch.delta is not None:
        every = read.count("full_attention_interval", 4)
        made = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
        return _known(read, LINEAR, FULL) if given else made
    if arch.chunked:
        if not values.get("attention_chunk_size", CHUNK):
            return [FULL] * layers
        turns = _turning(read, arch, layers)
        return (
            _known(read, CHUNKED, FULL) if given else [CHUNKED if turn else FULL for turn in turns]
        )
    slides = bool(values.get("sliding_window", arch.sliding_window))
    if arch.switched:
        slides = slides and read.flag("use_sliding_window")
    if arch.slides is None or not slides:
        return [FULL] * layers
    if arch.slides == "always":
        return [SLIDES] * layers
    if given is not None:
        return _known(read, SLIDES, FULL)
    if arch.slides == "unturned":
        return [FULL if turn else SLIDES for turn in _turning(read, arch, layers)]
    if arch.slides in ("late", "early"):
        border = read.count("max_window_layers", BORDER, least=0)
        late = arch.slides == "late"
        ours = [i >= border if late else i < border and i % 2 == 0 for i in range(layers)]
        return [SLIDES if own else FULL for own in ours]
    told = arch.full_every
    every = told if isinstance(told, int) else read.count(told[0], told[1], least=0)
    return [FULL if every and (i + 1) % every == 0 else SLIDES for i in range(layers)]


def _known(read: Reader, *kinds: str) -> list[str]:
    """``layer_types``, each one of ``kinds``."""
    types = read.names("layer_types")
    if unknown := [kind for kind in types if kind not in kinds]:
        raise ConfigError(f"{read.file}: layer_types has {unknown[0]!r}, which nothing here is")
    return types


def _turning(read: Reader, arch: Arch, layers: int) -> list[bool]:
    """Whether positions turn the queries and keys of each layer."""
    if arch.no_rope is None:
        return [True] * layers
    if arch.no_rope == "all":
        return [False] * layers
    if arch.no_rope == "baseless":
        base = read.mapping("rope_parameters").get("rope_theta", 0)
        return [base is not None] * layers
    if arch.no_rope == "untold":
        return [read.values.get("position_embedding_type") == "rope"] * layers
    if arch.no_rope == "full":
        return [kind == SLIDES for kind in _read_types(read, arch)]
    listed = read.values.get("no_rope_layers")  # 1: has rope
    if not listed:
        every = read.count("no_rope_layer_interval", 4)
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers:
        raise ConfigError(f"{read.file}: no_rope_layers must have 0 or 1 for each layer")
    return [bool(each) for each in listed]


def _read_rope(read: Reader, arch: Arch, layers: str) -> RopeConfig:
    """All forms: ``rope_parameters`` (of all layers, or by their type) or ``rope_scaling`` beside
    ``rope_theta``; layers that slide may have a base of their own, unscaled."""
    values, file = read.values, read.file
    given: dict[str, Any] = dict(read.mapping("rope_scaling") or read.mapping("rope_parameters"))
    if arch.rope_told and not given:
        raise ConfigError(f"{file}: field 'rope_parameters' is missing; the model needs it")
    _refuse_flat(read, arch)
    default = arch.rope_theta
    if arch.local_rope is not None and layers == SLIDES:
        name, default = arch.local_rope
        inner = Reader(given, file).mapping(layers)
        given = dict(inner or {"rope_theta": values.get(name)})
    elif any(isinstance(value, Mapping) for value in given.values()):
        if not isinstance(given.get(layers), Mapping):
            raise ConfigError(f"{file}: rope_parameters say nothing of {layers}")
        given = dict(given[layers])
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = ROPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    kind = "longrope" if kind == "yarn" and arch.longrope is not None else kind
    if not isinstance(kind, str) or kind not in ROPE_NEEDS:
        raise ConfigError(f"{file}: rope_type {kind!r} is not one of {', '.join(ROPE_NEEDS)}")
    if arch.qk_norm_over == "turned" and kind in ("yarn", "longrope"):
        raise ConfigError(
            f"{file}: rope_type {kind!r} scales queries and keys, which are normalised here"
        )
    for name in ROPE_NEEDS[kind]:
        if given.get(name) is None:
            raise ConfigError(f"{file}: field {name!r} is missing; rope_type {kind!r} needs it")
    theta = given.pop("rope_theta", None)
    if theta is None and not (arch.local_rope is not None and layers == SLIDES):
        theta = values.get("rope_theta")
    theta = Reader({"rope_theta": default if theta is None else theta}, file).number(
        "rope_theta", above=0
    )
    partial = _read_share(read, arch, given)
    if kind == "default":
        # transformers ignores the factor for most architectures' unscaled rotary; so do we.
        share = 1.0 if arch.partial_rotary is None else partial
        axes = _read_axes(read, arch, given, share)
        return RopeConfig(kind=kind, theta=theta, partial=share, axes=axes)
    # A top-level value wins over the one inside, as in transformers.
    own = values.get("original_max_position_embeddings") or arch.longrope
    own = own or given.get("original_max_position_embeddings")
    given["original_max_position_embeddings"] = own or read.count("max_position_embeddings")
    scaling = {name: given[name] for name in sorted(given) if name not in NO_SCALING}
    _check_scaling(scaling, file)
    axes = _read_axes(read, arch, given, partial)
    return RopeConfig(kind=kind, theta=theta, partial=partial, scaling=scaling, axes=axes)


def _refuse_flat(read: Reader, arch: Arch) -> None:
    """``rope_parameters`` of all layers, where transformers takes them by their type alone."""
    given = read.mapping("rope_parameters")
    if arch.local_rope is None or not given or any(isinstance(x, Mapping) for x in given.values()):
        return
    raise ConfigError(
        f"{read.file}: rope_parameters must be by type of layer here, "
        f'{{"{SLIDES}": {{...}}, "{FULL}": {{...}}}}; transformers ignores others'
    )


def _read_share(read: Reader, arch: Arch, given: dict[str, Any]) -> float:
    """What share of each head turns; taken out of ``given``."""
    partial = given.pop("partial_rotary_factor", read.values.get("partial_rotary_factor"))
    if partial is None and arch.partial_rotary is not None and read.values.get("rotary_dim"):
        partial = read.count("rotary_dim") / read.count("head_dim")
    if partial is None:
        partial = 1.0 if arch.partial_rotary is None else arch.partial_rotary
    share = Reader({"partial_rotary_factor": partial}, read.file).number("partial_rotary_factor", 0)
    if share > 1:
        raise ConfigError(f"{read.file}: partial_rotary_factor must be at most 1, got {partial!r}")
    return share


def _check_scaling(scaling: Mapping[str, Any], file: str) -> None:
    """Of parameters of rope: numbers, switches, and of two of them lists of numbers."""
    for name, value in scaling.items():
        if value is None or isinstance(value, bool):
            continue
        lists = name in ROPE_NEEDS["longrope"] and isinstance(value, list | tuple)
        for one in value if lists else [value]:
            Reader({name: one}, file).number(name)


def _read_axes(read: Reader, arch: Arch, given: Mapping[str, Any], share: float) -> tuple[int, ...]:
    """The position that turns each pair: ``mrope_section`` counts those of time, row and column.

    ``share`` of each head turns.
    """
    if arch.mrope is None:
        return ()
    sections = given.get("mrope_section") or MROPE_SECTIONS[arch.mrope]
    whole = read.count("head_dim", read.count("hidden_size") // read.count("num_attention_heads"))
    pairs = int(whole * share)
    known = isinstance(sections, list | tuple) and all(type(n) is int and n >= 0 for n in sections)
    if not known or len(sections) != 3 or sum(sections) != pairs // 2:
        raise ConfigError(
            f"{read.file}: mrope_section {sections!r:.100} must be three counts that add up to "
            f"half of the {pairs} dimensions of a head that turn"
        )
    if arch.mrope == "sections":
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * (pairs // 2)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)
