"""An update that all ranks have voted for: what they hold, and the receipt it will have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.engine.updates.coordinator import Coordinator
from rollout.errors import WeightMismatch
from rollout.weight_sync.protocol.digests import check_finite, combine, total
from rollout.weight_sync.protocol.messages import (
    ComponentReceipt,
    RankReceipt,
    Seal,
    UpdateReceipt,
    UpdateRequest,
)
from rollout.weights.components import component_of


@dataclass(frozen=True, slots=True)
class Sealed:
    """What the votes said; ``held``: digest per tensor of all that the ranks will hold."""

    seal: Seal
    votes: list[dict[str, Any]]
    held: dict[str, int]
    seconds: float

    def check_finite(self, of: Coordinator) -> None:
        """Refuse what the ranks, as they digested it, found to be no number; copies count once."""
        try:
            check_finite(combine([vote["nonfinite"] for vote in self.votes]))
        except WeightMismatch:
            of.engine.record_nonfinite()
            raise

    def receipt(self, of: Coordinator, request: UpdateRequest) -> UpdateReceipt:
        """All of the receipt but for the times of the commit."""
        seal = self.seal
        names = [name for name in seal.digests if name in of.metadata]
        assert request.version is not None
        return UpdateReceipt(
            components=self._components(of, names) if len(of.components) > 1 else {},
            version=request.version,
            epoch=of.engine.epoch,
            digest=total(seal.digests[name] for name in names),
            num_tensors=len(names),
            num_bytes=sum(of.metadata[name].nbytes for name in names),
            wire_bytes=seal.wire_bytes,
            timings={
                "gather": seal.gather_seconds,
                "transfer": seal.transfer_seconds,
                "stage": max(vote["stage_seconds"] for vote in self.votes),
                "verify": self.seconds,
            },
            ranks=tuple(
                RankReceipt(
                    rank=rank,
                    version=request.version,
                    digest=total(row[3] for row in vote["digests"]),
                    num_bytes=vote["num_bytes"],
                )
                for rank, vote in enumerate(self.votes)
            ),
            update_id=request.update_id,
            transport=request.transport,
            label=request.label,
            details={
                **seal.details,
                "rank_digest_seconds": f"{max(v['verify_seconds'] for v in self.votes):.6f}",
            },
        )

    def _components(self, of: Coordinator, names: list[str]) -> dict[str, ComponentReceipt]:
        """What was sent, by component."""
        parts: dict[str, list[str]] = {}
        for name in names:
            parts.setdefault(component_of(name), []).append(name)
        return {
            component: ComponentReceipt(
                digest=total(self.seal.digests[name] for name in found),
                num_tensors=len(found),
                num_bytes=sum(of.metadata[name].nbytes for name in found),
            )
            for component, found in parts.items()
        }
