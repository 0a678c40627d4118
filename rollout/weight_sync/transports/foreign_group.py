"""A place in the group that a framework's own trainer leads, as vLLM's weight transfer has it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

START_LIMIT = 60.0  # seconds for the process of a gloo place to import torch, on a busy machine
ALIVE_LIMIT = 5.0  # seconds for the trainer's store to say that it is there


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignGroup:
    """Where the trainer listens, and the places: 0 is the trainer's, ours begin at the offset.

    ``name``: of a torch process group, as SGLang's trainers make it; "" for vLLM's, which has none.
    """

    host: str
    port: int
    rank_offset: int
    size: int
    name: str = ""

    def store(self, tcp: Any, device: str) -> Any:
        """``tcp`` as the group's backend on ``device`` ("cpu", "cuda") sees it.

        A process group that is made under a name beside the default one has its keys below three
        prefixes: the name for the rendezvous, the name for the group, and the device.
        """
        for prefix in (self.name, f"{self.name}/", f"{device}/") if self.name else ():
            tcp = dist.PrefixStore(prefix, tcp)
        return tcp

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


class Member(Protocol):
    """One place in the group. ``close`` may come from any thread, and frees the others."""

    def join(self, timeout: float) -> None: ...

    def receive(self, nbytes: int, timeout: float) -> Tensor:
        """The next broadcast of the trainer, uint8 [nbytes], valid until the next call."""
        ...

    def is_alive(self) -> bool:
        """Whether the trainer's store still answers on the connection of ``join``."""
        ...

    def close(self) -> None: ...
