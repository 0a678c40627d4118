"""What a checkpoint's ``config.json`` says about a model; the only reader of its attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from rollout.errors import ConfigError
from rollout.models.arch import Arch
from rollout.models.config.delta import DeltaConfig, read_delta
from rollout.models.config.fields import (
    read_activation,
    read_architectures,
    read_experts,
    read_head_dim,
    read_heads,
    read_prefixes,
    refuse_bidirectional,
    text_reader,
    token_ids,
)
from rollout.models.config.labels import read_labels
from rollout.models.config.latent import LatentConfig, read_latent
from rollout.models.config.layer import LayerConfig, RopeConfig, read_layers
from rollout.models.config.mamba import MambaConfig, read_mamba
from rollout.models.config.moe import MoEConfig
from rollout.models.config.overrides import overridden
from rollout.models.config.reader import Reader, read_json
from rollout.models.config.vision import VisionConfig, read_vision
from rollout.models.registry import Registry
from rollout.models.transformers_backend.cache import Kept, StateSizes
from rollout.models.transformers_backend.probe import probe
from rollout.models.transformers_backend.ranks import OverRanks
from rollout.models.transformers_backend.remote_code import RemoteCode
from rollout.weights.files.scaled import scheme_name

T = TypeVar("T", bound="ModelConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of one decoder. ``dtype`` is the checkpoint's, not the engine's.

    ``arch`` is what the architecture declares, the other fields what the file says, by its rules.
    Factors are 1 and caps 0 where there is none. ``prefixes``: what checkpoints put before names,
    or hold for a purpose that is none here (``weights.names.placed``). ``hf_values``: the whole
    file, of a model that runs as transformers' modules (``transformers_lm.py``); None for one of
    ours. ``vision``: of a model that sees images. ``code``: leave to run the checkpoint's own.
    ``modules``: classes in the place of transformers' (``module_map.py``). ``labels``: the names of
    what a score head, which stands in the place of the language model's, tells apart; none without
    one. ``problem_type``: what its logits are, as transformers names it; "" where the file is mute.
    ``pad_token_id``: its padding, behind which no last token is.
    ``quantization``: the scheme in which the files have the linears, "none" where there is none.
    ``kept``: of modules that attend by themselves, what each entry of the cache is
    (``transformers_backend/cache.py``). ``over_ranks``: how transformers' modules are cut.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    arch: Arch = field(default_factory=Arch)
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attention_ends: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    hf_values: Mapping[str, Any] | None = None
    head_bias: bool = False
    vision: VisionConfig | None = None
    code: RemoteCode | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    problem_type: str = ""
    pad_token_id: int | None = None
    kept: tuple[Kept, ...] | None = None
    over_ranks: OverRanks | None = field(default=None, compare=False)
    quantization: str = "none"

    @classmethod
    def from_hf(
        cls,
        values: Mapping[str, Any],
        *,
        file: str = "config.json",
        registry: Registry | None = None,
        code: RemoteCode | None = None,
    ) -> Self:
        """Read the plain dict of a ``config.json``; ``file`` only names it in errors.

        ``code``: leave to run the checkpoint's own, of an architecture that nobody else has.

        Raises ``ConfigError`` for an unsupported architecture, a missing or malformed field, and
        for what these models cannot do.
        """
        read = Reader(values, file)
        registry = registry or Registry()
        names = read_architectures(read)
        if not registry.knows(names):
            return _by_transformers(cls, read, names, registry, code)
        architecture = registry.choose(names)
        outer = registry.arch(architecture)
        arch, read = text_reader(values, outer, file)
        heads, kv_heads = read_heads(read)
        layers = read_layers(read, arch)
        scaling = layers[0].rope.scaling
        moe = read_experts(read, arch, layers)
        latent = None if arch.latent is None else read_latent(read, arch.latent, scaling)
        head_dim = latent.rope_dim if latent else read_head_dim(read, arch, heads)
        classifies = registry.decoder_of(architecture) is not None
        labels, problem_type = read_labels(read) if classifies else ((), "")
        padding = read.values.get("pad_token_id") if classifies else None
        padding = token_ids(padding, file, "pad_token_id")
        ends, (gate, makes) = arch.attention_ends or (None, None), read.factors(arch.mlp_scales, 2)
        return cls(
            architecture=architecture,
            vocab_size=read.count("vocab_size"),
            hidden_size=read.count("hidden_size"),
            intermediate_size=read.count(arch.mlp_size),
            num_layers=read.count("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=read.number(arch.norm_eps),
            max_position_embeddings=read.count("max_position_embeddings"),
            layers=layers,
            tied=not labels and read.flag("tie_word_embeddings", arch.tied),
            qkv_bias=read.switch(arch.qkv_bias),
            o_bias=read.switch(arch.o_bias),
            mlp_bias=read.switch(arch.mlp_bias),
            head_bias=not labels and read.switch(arch.head_bias),
            qk_norm=read.switch(arch.qk_norm),
            dtype=read.dtype(),
            eos_token_ids=token_ids(read.values.get("eos_token_id"), file),
            latent=latent,
            delta=None if arch.delta is None else read_delta(read, arch.delta),
            mamba=None if arch.mamba is None else read_mamba(read, arch.mamba),
            moe=moe,
            prefixes=read_prefixes(read, arch, outer.texts is not None),
            arch=arch,
            activation=read_activation(read, arch, moe),
            embedding_scale=read.scale(arch.embedding_scale),
            attention_scale=read.scale(arch.attention_scale, head_dim**-0.5)
            * read.scale(arch.key_scale),
            attention_ends=(read.factor(ends[0]), read.factor(ends[1])),
            mlp_scales=(gate, makes),
            residual_scale=read.scale(arch.residual_scale),
            logits_scale=read.scale(arch.logits_scale),
            attention_softcap=read.softcap(arch.attention_softcap),
            logits_softcap=read.softcap(arch.logits_softcap),
            labels=labels,
            problem_type=problem_type,
            pad_token_id=padding[0] if padding else None,
            vision=None if outer.vision is None else read_vision(values, outer.vision, read),
            quantization=scheme_name(read.values.get("quantization_config"), read.file),
        )

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        registry: Registry | None = None,
        *,
        overrides: Mapping[str, Any] | None = None,
        code: RemoteCode | None = None,
    ) -> Self:
        """Read ``config.json`` of a checkpoint directory, without touching the network.

        ``overrides`` replace its fields, those of objects one by one. End-of-sequence ids of a
        ``generation_config.json`` join those of the config; nothing else of that file is used.
        """
        file = Path(path) / "config.json"
        values = overridden(read_json(file), overrides or {})
        config = cls.from_hf(values, file=str(file), registry=registry, code=code)
        extra_file = Path(path) / "generation_config.json"
        if not extra_file.is_file():
            return config
        extra = token_ids(read_json(extra_file).get("eos_token_id"), str(extra_file))
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra))))

    def cached_heads(self, size: int) -> tuple[int, int, int]:
        """What a rank of ``size`` keeps of a token in each layer: (tensors, heads, their elements).

        Keys and values; or, of latent attention, one vector that is both, whole on every rank.
        """
        if self.latent is not None:
            return 1, 1, self.latent.cached
        if self.over_ranks is not None:
            return 2, self.over_ranks.kv_heads(size), self.head_dim
        return 2, max(1, self.num_kv_heads // size), self.head_dim

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """Those that keep keys of an index, ``latent.index.dim`` elements a token, on each rank."""
        return self.latent.index.layers if self.latent and self.latent.index else ()

    @property
    def further_prefixes(self) -> tuple[str, ...]:
        """What names of tensors begin with in layers that predict further tokens."""
        passed = (prefix for prefix, own in self.prefixes.items() if not own)
        return tuple(prefix for prefix in passed if prefix.startswith(("mtp.", "model.layers.")))

    def check_blocks(self, block_size: int) -> None:
        """Raise ``ConfigError`` where a block of the KV cache would lie in two chunks."""
        for chunk in {layer.chunk for layer in self.layers}:
            if chunk % block_size:
                raise ConfigError(
                    f"block_size {block_size} must divide attention_chunk_size {chunk}"
                )

    def check_tensor_parallel(self, size: int, expert_parallel: bool = False) -> None:
        """Raise ``ConfigError``, with the sizes that work, unless this model divides over ``size``
        ranks.

        KV heads divide, or are replicated when ``size`` is a multiple of them; the vocabulary is
        padded and always divides. With ``expert_parallel`` whole experts are dealt out instead of
        a part of each: any number of them that leaves no rank without one.
        """
        if self.over_ranks is not None:
            self.over_ranks.kv_heads(size)
            return
        try:
            self._check_size(size, expert_parallel)
        except ConfigError as error:
            fitting = [n for n in range(1, self.num_heads + 1) if self._fits(n, expert_parallel)]
            if not fitting:
                raise
            sizes = ", ".join(map(str, fitting))
            raise ConfigError(f"{str(error).rstrip('.')}. Sizes that work: {sizes}.") from None

    def _fits(self, size: int, expert_parallel: bool) -> bool:
        try:
            self._check_size(size, expert_parallel)
        except ConfigError:
            return False
        return True

    def _check_size(self, size: int, expert_parallel: bool) -> None:
        self._check_experts(size, expert_parallel)
        if self.num_heads % size:
            raise ConfigError(
                f"Total number of attention heads ({self.num_heads}) must be divisible by "
                f"tensor parallel size ({size})."
            )
        if self.latent is None and self.num_kv_heads % size and size % self.num_kv_heads:
            raise ConfigError(
                f"Number of key/value heads ({self.num_kv_heads}) must be divisible by tensor "
                f"parallel size ({size}), or divide it (they are then replicated)."
            )
        if self.delta is not None and self.delta.key_heads % size:
            raise ConfigError(
                f"Number of linear attention key heads ({self.delta.key_heads}) must be divisible "
                f"by tensor parallel size ({size})."
            )
        if self.mamba is not None:
            self.mamba.check_tensor_parallel(size)
        if self._has_dense_layers and self.intermediate_size % size:
            raise ConfigError(
                f"Intermediate size ({self.intermediate_size}) must be divisible by tensor "
                f"parallel size ({size})."
            )

    @property
    def recurrence(self) -> DeltaConfig | MambaConfig | StateSizes | None:
        """The sizes of the layers that carry a state."""
        return self.delta or self.mamba or StateSizes.of(self.kept or ())

    @property
    def text_ids(self) -> Sequence[int]:
        """The ids that a prompt that shows nothing may have."""
        ids, vision = range(self.vocab_size), self.vision
        taken = () if vision is None else (vision.image_token, vision.video_token)
        return [i for i in ids if i not in taken] if taken else ids

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that carry a state, instead of keys and values or beside."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrent)

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """Those that keep keys and values."""
        gone = {i for i in self.recurrent_layers if not self.layers[i].beside}
        return tuple(i for i in range(self.num_layers) if i not in gone | {*self.feeding_layers})

    @property
    def feeding_layers(self) -> tuple[int, ...]:
        """Those that are a feed-forward alone: they keep nothing of a token."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.feeds is not None)

    def kind_of(self, layer: int) -> tuple[object, ...]:
        """Layers of one kind have the same tensors."""
        sparse = self.moe is not None and self.moe.is_sparse(layer)
        of = self.layers[layer] if self.layers else None
        return (sparse,) if of is None else (sparse, of.recurrent, of.feeds)

    @property
    def _has_dense_layers(self) -> bool:
        moe = self.moe
        if self.arch.lone:
            return any(layer.feeds == "mlp" for layer in self.layers)
        return moe is None or not all(moe.is_sparse(layer) for layer in range(self.num_layers))

    def _check_experts(self, size: int, expert_parallel: bool) -> None:
        moe = self.moe
        if moe is None:
            if expert_parallel:
                raise ConfigError(f"{self.architecture} has no experts; unset expert_parallel")
            return
        if expert_parallel and moe.num_experts < size:
            raise ConfigError(
                f"{moe.num_experts} experts cannot be dealt out to {size} ranks; unset "
                "expert_parallel, or use fewer ranks"
            )
        sizes = {"Shared expert": moe.shared_size, "Expert": moe.expert_size}
        if expert_parallel:
            del sizes["Expert"]
        for what, inner in sizes.items():
            if inner % size:
                raise ConfigError(
                    f"{what} intermediate size ({inner}) must be divisible by tensor parallel "
                    f"size ({size})" + ("" if what[0] == "S" else ", or set expert_parallel")
                )


def _by_transformers(
    cls: type[T], read: Reader, names: list[str], registry: Registry, code: RemoteCode | None
) -> T:
    """Of an architecture that nothing here declares; ``ConfigError`` says why it is not served."""
    refuse_bidirectional(read)
    try:
        found = probe(read.values, names[0] if names else "", read.file, code)
    except ConfigError as error:
        raise registry.refusal(names, f" Nor by transformers: {error}.") from None
    return cls(
        architecture=found.architecture,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=1,
        num_layers=found.num_layers,
        num_heads=found.num_heads,
        num_kv_heads=found.num_kv_heads,
        head_dim=found.head_dim,
        norm_eps=0.0,
        max_position_embeddings=found.max_position_embeddings,
        layers=_entries(found.kept),
        tied=found.tied,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        dtype=read.dtype(),
        eos_token_ids=token_ids(read.values.get("eos_token_id"), read.file),
        hf_values=found.values,
        code=code,
        kept=found.kept,
        over_ranks=OverRanks(whole=found, code=code),
    )


def _entries(kept: tuple[Kept, ...] | None) -> tuple[LayerConfig, ...]:
    """A layer for each entry of the cache, where modules attend by themselves."""
    rope = RopeConfig(kind="none")
    return tuple(
        LayerConfig(window=0, rope=rope, recurrent=one.kind == "states") for one in kept or ()
    )
