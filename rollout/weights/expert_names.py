"""What files and transformers 5 call the experts of a layer.

Mixtral's files say ``block_sparse_moe`` and ``w1 w3 w2`` where memory says ``mlp``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How files name the experts of a layer: the linears of one, and the module that has them all.

    ``memory``: what transformers 5 calls that module.
    """

    gate: str
    up: str
    down: str
    module: str = "mlp"
    memory: str = "mlp"

    @property
    def linears(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down


PROJ_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")
W123_NAMES = ExpertNames("w1", "w3", "w2", module="block_sparse_moe")
# All that an architecture declares; a stream is told by them, without a word about the model.
EXPERT_NAMES = (PROJ_NAMES, W123_NAMES)
# Granite's experts, stacked in files too: what files call them -> what transformers 5 does.
_STACKED = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}
# Stacked experts that a model holds one by one, as it does where they are quantised: both linears
# of one -> whether files have them transposed, whatever their shapes.
STACKED = {("gate_up_proj", "down_proj"): True, ("input_linear", "output_linear"): False}
_MEMORY = {names.module: names.memory for names in EXPERT_NAMES}


def is_expert(parts: list[str]) -> bool:
    """Whether name components read ``... experts.<number>.<linear>.weight``."""
    return (
        len(parts) >= 4
        and parts[-1] == "weight"
        and parts[-4] == "experts"
        and parts[-3].isdecimal()
        and any(parts[-2] in linears for linears in (*(n.linears for n in EXPERT_NAMES), *STACKED))
    )


def expert_part(stacked: str, index: int) -> str:
    """The name that a linear of one expert has by itself, of the tensor that stacks all of them."""
    prefix, _, linear = stacked.rpartition(".")
    return f"{prefix}.{index}.{linear}.weight"


def memory_name(name: str) -> str:
    """What transformers 5 calls in memory what a file calls ``name``, by its components."""
    return ".".join(_MEMORY.get(part, part) for part in name.split("."))


def stacked_name(name: str) -> str | None:
    """What transformers 5 calls in memory a tensor of experts that are stacked in files, too."""
    before, module, rest = name.partition(".block_sparse_moe.")
    return f"{before}{module}{_STACKED[rest]}" if rest in _STACKED else None
