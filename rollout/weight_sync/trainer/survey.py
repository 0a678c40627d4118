"""Which boxes the trainer's ranks hold, and what is remembered of that between updates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import RolloutError
from rollout.weight_sync.protocol.codec import (
    boxes_from_wire,
    boxes_to_wire,
    wants_from_wire,
    wants_to_wire,
)
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Wants,
    WeightInfo,
)
from rollout.weight_sync.trainer.lockstep import source_failed
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.reshard_plan import Layout, gap, plan_rounds
from rollout.weight_sync.trainer.sources.base import LocalSource, WeightSource
from rollout.weights import TensorMeta

MAX_PART = (
    16 << 20
)  # bytes of a part that a rank compares at once; no transport has shorter buckets


@dataclass(frozen=True, slots=True)
class Survey:
    """The boxes of every trainer rank; the same on all of them.

    ``problem``: why they cannot be sent from where they are, or None. ``split``: whether no rank
    holds everything. ``knows``: per rank, the digest of the engine's wants that it remembers.
    """

    problem: str | None
    have: tuple[Layout, ...] = ()
    metadata: tuple[TensorMeta, ...] = ()
    layout: str = ""
    knows: tuple[str, ...] = ()
    copies: tuple[tuple[Any, ...], ...] = ()  # what each rank's copies are of, for deltas

    @property
    def split(self) -> bool:
        numel = sum(meta.numel for meta in self.metadata)
        return all(
            sum(box.numel for boxes in layout.values() for box in boxes) < numel
            for layout in self.have
        )

    @property
    def divided(self) -> bool:
        """Whether every rank can read its own boxes, and some do not hold everything."""
        numel = sum(meta.numel for meta in self.metadata)
        sizes = [sum(b.numel for boxes in x.values() for b in boxes) for x in self.have]
        return self.problem is None and len(self.have) > 1 and min(sizes) < numel


class PlanCache:
    """One trainer rank's memory between updates: one layout of the source, one of the engine.

    Belongs to whoever talks to the engine (``WeightVerbs``), on every rank of the trainer; the
    rounds of an update are planned anew only when either layout has changed.
    """

    def __init__(self) -> None:
        self.layout = ""  # digest of ``wants``
        self._wants: Wants = ()
        self._aliases: dict[str, str] = {}
        self._survey: Survey | None = None
        self._planned: tuple[Any, tuple[BucketHeader, ...]] | None = None
        self.num_planned = 0
        self.told_alone = False  # whether it has been said that every rank makes its own version

    def surveyed(self, layout: str) -> Survey | None:
        """The survey of the source that has this digest, if it was the last one."""
        return self._survey if self._survey is not None and self._survey.layout == layout else None

    @property
    def source_layout(self) -> str:
        return "" if self._survey is None else self._survey.layout

    def keep(self, survey: Survey) -> None:
        self._survey = survey

    def wants_for(self, begun: Begun, survey: Survey) -> dict[str, Any]:
        """On the sender: the engine's wants as told to the other ranks, unless all know them."""
        if begun.wants is not None:
            self.layout, self._wants = begun.layout, begun.wants
        if all(known == begun.layout for known in survey.knows):
            return {"layout": begun.layout, "wants": None}
        return {"layout": begun.layout, "wants": wants_to_wire(self._wants)}

    def learn(self, told: Mapping[str, Any], info: WeightInfo) -> None:
        """On every rank: what ``wants_for`` said."""
        if told["wants"] is not None and told["layout"] != self.layout:
            self.layout, self._wants = told["layout"], wants_from_wire(told["wants"])
        assert self.layout == told["layout"]
        # An alias is sent to whoever takes its owner, to be compared with it.
        self._aliases = dict(info.aliases)

    def rounds(self, survey: Survey, bucket_bytes: int) -> tuple[BucketHeader, ...]:
        """What every rank sends to whom."""
        key = (survey.layout, self.layout, bucket_bytes)
        if self._planned is None or self._planned[0] != key:
            want = [
                {**rank, **{a: rank[o] for a, o in self._aliases.items() if o in rank}}
                for rank in self._wants
            ]
            self._planned = (key, plan_rounds(survey.metadata, survey.have, want, bucket_bytes))
            self.num_planned += 1
        return self._planned[1]


def shard_layout(layout: str, bucket_bytes: int) -> str:
    """Names how a source of this layout is cut into the parts that ranks compare."""
    return f"{layout}/{min(bucket_bytes, MAX_PART)}"


def survey(
    source: WeightSource,
    agreement: Agreement,
    timeout: float,
    plans: PlanCache,
    copies: Sequence[Any] = (),
) -> Survey:
    """Tell each other what every rank holds; collective. Boxes travel when some have changed."""
    failure: RolloutError | None = None
    looked: _Look = ("", (), {})
    try:
        looked = _look(source)
    except RolloutError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - the trainer's own code
        failure = source_failed(error, "")
    agreement.vote(failure, timeout, "survey")
    problem, metadata, mine = looked
    status = {
        "problem": problem,
        "mine": _digest(mine),
        "metadata": _digest([[m.name, str(m.dtype), list(m.shape)] for m in metadata]),
        "source": plans.source_layout,
        "wants": plans.layout,
        "copies": list(copies),
    }
    said = agreement.exchange(status, timeout, "survey")
    problems = [
        f"on trainer rank {rank}, {s['problem']}" for rank, s in enumerate(said) if s["problem"]
    ]
    if len({s["metadata"] for s in said}) > 1:
        problems.append("trainer ranks hold other tensors than each other")
    if problems:
        return Survey(problems[0])
    knows = tuple(s["wants"] for s in said)
    kept = tuple(tuple(s["copies"]) for s in said)
    layout = _digest([said[0]["metadata"], *(s["mine"] for s in said)])
    if all(s["source"] == layout for s in said):
        known = plans.surveyed(layout)
        assert known is not None
        return Survey(known.problem, known.have, known.metadata, layout, knows, kept)
    boxes = agreement.exchange({"boxes": mine}, timeout, "boxes")
    have = tuple(boxes_from_wire(reply["boxes"]) for reply in boxes)
    found = Survey(gap(metadata, have), have, metadata, layout, knows, kept)
    plans.keep(found)
    return found


_Look = tuple[str, tuple[TensorMeta, ...], dict[str, Any]]


def _look(source: WeightSource) -> _Look:
    """What is in the way on this rank, or "", and its metadata and boxes."""
    metadata = source.metadata()
    if metadata is None:
        return "the source learns its tensors only while it gathers them", (), {}
    if not isinstance(source, LocalSource):
        return f"{_kind(source)} cannot read its boxes without a gather", (), {}
    return "", metadata, boxes_to_wire(dict(source.local_boxes()))


def _kind(source: Any) -> str:
    """The class of the trainer's own source, beneath what reads and splits it."""
    while hasattr(source, "inner"):
        source = source.inner
    return type(source).__name__


def _digest(obj: Any) -> str:
    return hashlib.sha256(json.dumps(obj, sort_keys=True).encode()).hexdigest()
