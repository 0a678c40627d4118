"""What the tower made, kept on the ranks: who decides what is made, kept and dropped.

Entries have the content of an image or of frames as their key and hold for one version of the
weights: they all go when it changes, and whenever the prefix cache is reset. The ranks do as each
step's plan says, so that bookkeeping here and tensors there agree without a reply.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.engine.sequences.sequence import ScheduledBatch
from rollout.generation import PlacedVisual


@dataclass(slots=True)
class EncoderFigures:
    """``queries``: visuals that steps needed; ``hits``: those that were kept already."""

    queries: int = 0
    hits: int = 0
    nbytes: int = 0

    def stats(self) -> dict[str, int]:
        """By the names of ``EngineStats``."""
        return {
            "encoder_cache_queries_total": self.queries,
            "encoder_cache_hits_total": self.hits,
            "encoder_cache_bytes": self.nbytes,
        }


class EncoderCache:
    """At most ``max_bytes`` of features between steps, of ``part_bytes`` for each part.

    What one step needs is there for that step, however much. Engine thread only.
    """

    def __init__(self, max_bytes: int, part_bytes: int) -> None:
        self.figures = EncoderFigures()
        self._max_bytes, self._part_bytes = max_bytes, part_bytes
        self._held: OrderedDict[str, int] = OrderedDict()  # key -> bytes, longest unused first
        self._chain: int | None = None
        self._forget = True

    def forget(self) -> None:
        """A step has failed: nobody knows what the ranks hold; they drop it with the next plan."""
        self._held.clear()
        self.figures.nbytes = 0
        self._forget = True

    def plan(self, batch: ScheduledBatch, chain: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Arguments and tensors of a step that computes tokens of visuals; empty for another.

        ``chain`` is another number whenever nothing kept before may be used. ``encode``: (key,
        grid) of each visual whose patches follow each other in ``pixels``; ``use``: (key, first
        part, past the last, row of the step) in the order of the rows; ``drop``: keys, afterwards.
        """
        if chain != self._chain:
            self._chain = chain
            self.forget()
        needed: dict[str, PlacedVisual] = {}
        use: list[tuple[str, int, int, int]] = []
        row = 0
        for entry in batch.entries:
            for placed in entry.sequence.visuals:
                first, last = max(entry.start, placed.start), min(entry.stop, placed.stop)
                if first >= last:
                    continue
                key = placed.visual.digest.hex()
                needed[key] = placed
                at = row + first - entry.start
                use.append((key, first - placed.start, last - placed.start, at))
            row += entry.num_new
        if not needed:
            return {}, {}
        missing = [key for key in needed if key not in self._held]
        self.figures.queries += len(needed)
        self.figures.hits += len(needed) - len(missing)
        for key, placed in needed.items():
            self._held[key] = placed.visual.count * self._part_bytes
            self._held.move_to_end(key)
        missed = [needed[key].visual for key in missing]
        plan = {
            "forget": self._forget,
            "encode": [(key, *needed[key].visual.grid) for key in missing],
            "use": use,
            "drop": self._dropped(),
        }
        self._forget = False
        return {"visuals": plan}, (
            {"pixels": torch.cat([visual.pixels for visual in missed])} if missed else {}
        )

    def _dropped(self) -> list[str]:
        total, dropped = sum(self._held.values()), []
        while total > self._max_bytes:
            key, nbytes = self._held.popitem(last=False)
            total -= nbytes
            dropped.append(key)
        self.figures.nbytes = total
        return dropped


class EncodedVisuals:
    """A rank's end: the tensors, by the plans of an ``EncoderCache``."""

    def __init__(self) -> None:
        self._features: dict[str, Tensor] = {}

    def clear(self) -> None:
        self._features.clear()

    def follow(
        self, plan: Mapping[str, Any], encode: Any, pixels: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows of the step [parts], and their features [parts, 1 + levels, hidden].

        ``encode(pixels, grid)`` makes the features of one visual. One at a time: they do not
        depend on which others a step needs.
        """
        if plan["forget"]:
            self._features.clear()
        start = 0
        for key, *grid in plan["encode"]:
            count = grid[0] * grid[1] * grid[2]
            assert pixels is not None
            self._features[key] = encode(pixels[start : start + count], tuple(grid))
            start += count
        rows = [torch.arange(row, row + last - first) for _, first, last, row in plan["use"]]
        parts = [self._features[key][first:last] for key, first, last, _ in plan["use"]]
        found = torch.cat(rows), torch.cat(parts)
        for key in plan["drop"]:
            self._features.pop(key, None)
        return found
