"""What a LoRA adapter is, beside its tensors: which modules, of which rank, scaled by what."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack, unpack

from rollout.errors import ConfigError
from rollout.wire.codec import ADDED, Positive, Table, Text

FLOAT32_MAX = 3.4028234663852886e38
# Behind a module: [rank, in], [out, rank], and of DoRA [out]. Of stacked experts, as PEFT
# has them: [experts x rank, in], rows by expert, and [out, rank x experts], columns by rank.
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
EMBEDDING_A, EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"  # [rank, in], [out, rank]
BIAS = ".lora_B.bias"  # [out]
LINEAR, DORA, EMBEDDING, EXPERTS = "linear", "dora", "embedding", "experts"
BIASED, DORA_EMBEDDING = "biased", "dora_embedding"
KINDS = (LINEAR, DORA, EMBEDDING, EXPERTS, BIASED, DORA_EMBEDDING)
NORMED = (DORA, DORA_EMBEDDING)  # with magnitudes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """``scaling`` of B A is alpha / rank, or alpha / sqrt(rank) of a rank-stabilised one.

    ``kind``: "linear", "dora", of which each output has the norm that its magnitude says, "biased",
    with a bias beside B, which is scaled with it, "embedding", whose inputs are the vocabulary,
    "dora_embedding", or "experts", a parameter that stacks a linear of all experts of a layer, each
    of which has factors of its own.
    """

    rank: Positive
    scaling: float  # a finite float32
    kind: Text = field(default=LINEAR, metadata=ADDED)

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """All that it is made of, by name, beside a weight of ``shape``: [rows, columns], or
        [experts, rows, columns].
        """
        *experts, rows, columns = shape
        if self.kind == EXPERTS:
            stacked = self.rank * experts[0]
            return {module + A: (stacked, columns), module + B: (rows, stacked)}
        ends = (A, B)
        if self.kind in (EMBEDDING, DORA_EMBEDDING):
            ends, rows, columns = (EMBEDDING_A, EMBEDDING_B), columns, rows
        found: dict[str, tuple[int, ...]] = {
            module + ends[0]: (self.rank, columns), module + ends[1]: (rows, self.rank)
        }  # fmt: skip
        if self.kind in NORMED:
            found[module + MAGNITUDE] = (rows,)
        if self.kind == BIASED:
            found[module + BIAS] = (rows,)
        return found

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"an adapter of kind {self.kind!r:.40} is not served")
        if not abs(self.scaling) <= FLOAT32_MAX:
            raise ConfigError(f"an adapter's scaling (alpha / rank) is {self.scaling}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """By module, as the checkpoint's files name it (``model.layers.0.self_attn.q_proj``)."""

    modules: Table[ModuleSpec]

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max((module.rank for module in self.modules.values()), default=0)

    @property
    def scaling_digest(self) -> int:
        """What each rank's slot has to answer; see ``digest_of_scalings``."""
        found = {name: of.scaling for name, of in self.modules.items()}
        found |= {name + MAGNITUDE: 1.0 for name, of in self.modules.items() if of.kind in NORMED}
        return digest_of_scalings(found)

    def check_modules(self, known: Collection[str]) -> None:
        """``ConfigError`` where it changes one beside which adapters cannot be served."""
        if unknown := sorted(self.modules.keys() - set(known)):
            raise ConfigError(
                f"the adapter changes {unknown[0]}, which is no linear of this model that adapters "
                "are served beside (embedding and head: with lora_embeddings=True, routed experts: "
                "with lora_experts=True); merge it, into the trainer's weights or by an engine "
                "without max_adapters"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """An adapter as it was once loaded: one name and number never mean other tensors."""

    name: Text
    version: int
    slot: int

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded:
    """``version``: of the weights, which is the adapter's, too, unless it was ``merged``."""

    name: str
    version: int
    merged: bool


def digest_of_scalings(scalings: Mapping[str, float]) -> int:
    """64 bits over how much each module's adapter counts, as float32; those of 0 are left out."""
    found = blake2b(digest_size=8)
    for module in sorted(scalings):
        bits = pack("<f", scalings[module])
        if unpack("<f", bits)[0]:
            found.update(f"{module}={bits.hex()};".encode())
    return int.from_bytes(found.digest(), "big")
