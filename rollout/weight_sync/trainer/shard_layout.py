"""Which boxes the trainer's ranks hold, and what is remembered of that between updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollout.distributed import LOOPBACK
from rollout.errors import RolloutError
from rollout.kernels.region_table import RegionTables
from rollout.weight_sync.protocol.committed import Committed
from rollout.weight_sync.protocol.in_place import InPlaceHeaders
from rollout.weight_sync.protocol.messages import (
    Begun,
    Boxes,
    BucketHeader,
    Wants,
    WeightInfo,
)
from rollout.weight_sync.trainer.lockstep import digest_of, source_failed
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.reshard_plan import RankBoxes, gap, laid_out, plan_rounds
from rollout.weight_sync.trainer.sources.known_adapters import KnownAdapters
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.transfer_stats import PlacesInPlace
from rollout.weight_sync.transports.host import host_id
from rollout.weights import Box, TensorMeta
from rollout.wire.codec import from_plain, to_plain

TRY_AGAIN = 600.0  # seconds until "auto" takes a way again that did not lead there
MAX_SHARD = 16 << 20  # bytes that a rank compares at once; no transport has shorter buckets


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Which boxes each trainer rank holds; the same on all of them.

    ``problem``: why they cannot be sent from where they are, or None. ``knows``: per rank, the
    digest of the engine's wants that it remembers.
    """

    problem: str | None
    have: tuple[RankBoxes, ...] = ()
    metadata: tuple[TensorMeta, ...] = ()
    digest: str = ""  # of all that
    knows: tuple[str, ...] = ()
    copies: tuple[tuple[Any, ...], ...] = ()  # what each rank's copies are of, for deltas
    hosts: tuple[str, ...] = ()  # where each rank runs
    first_at: str = LOOPBACK  # the address at which the other ranks reach the first
    not_mapped: str | None = ""  # see ``Holding``
    gpus: tuple[str, ...] = ()  # UUIDs of those that what would be mapped lies on
    rank_gpus: tuple[str, ...] = ()  # this and the next: see ``Holding``
    not_exchanged: str = ""

    @property
    def split(self) -> bool:
        """Whether no rank holds everything."""
        return max(self._sizes(), default=0) < self._numel()

    @property
    def divided(self) -> bool:
        """Whether every rank can read its own boxes, and some do not hold everything."""
        return self.problem is None and len(self.have) > 1 and min(self._sizes()) < self._numel()

    @property
    def num_hosts(self) -> int:
        """How many hosts the ranks are on."""
        return len(set(self.hosts))

    def cut(self, bucket_bytes: int) -> str:
        """Names how ranks cut their boxes into the shards that they compare."""
        return f"{self.digest}/{shard_bytes(bucket_bytes)}"

    def _numel(self) -> int:
        return sum(meta.numel for meta in self.metadata)

    def _sizes(self) -> list[int]:
        return [sum(b.numel for boxes in x.values() for b in boxes) for x in self.have]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lying:
    """Whether the engine's ranks can read one trainer rank's tensors where they lie: ``not_mapped``
    as ``Holding`` has it, ``gpus`` as ``ShardLayout``. ``here``: the UUID of its current GPU.
    ``not_exchanged``: why it brings the others no boxes between GPUs, or "".
    """

    not_mapped: str | None = ""
    gpus: tuple[str, ...] = ()
    here: str = ""
    not_exchanged: str = ""


class PlanCache:
    """One trainer rank's memory between updates: one layout of the source, one of the engine.

    Belongs to whoever talks to the engine (``WeightVerbs``), on every rank of the trainer; the
    rounds of an update are planned anew only when either layout has changed.
    """

    def __init__(self) -> None:
        self.tables = RegionTables()  # of what is digested where it lies on a device
        self.headers, self.places = InPlaceHeaders(), PlacesInPlace()  # of what is read there
        self.adapters = KnownAdapters()
        self.wants_digest = ""  # as the engine gave it
        self._wants: Wants = ()
        self._found: ShardLayout | None = None
        self._planned: tuple[Any, tuple[BucketHeader, ...]] | None = None
        self.num_planned = 0
        self.late: dict[str, float] = {}  # transports that "auto" passes over, and until when
        self.proven: set[str] = set()  # ``UpdatePlan.pieces`` of updates that have been committed
        self.told_alone = False  # whether it has been said that every rank makes its own version

    def found(self, digest: str) -> ShardLayout | None:
        """The layout of the source that has this digest, if it was the last one."""
        return self._found if self._found is not None and self._found.digest == digest else None

    @property
    def source_digest(self) -> str:
        return "" if self._found is None else self._found.digest

    def keep(self, found: ShardLayout) -> None:
        self._found = found

    def pass_over(self, transport: str) -> None:
        """Have "auto" take other ways for some time."""
        self.late[transport] = time.monotonic() + TRY_AGAIN

    def is_late(self, transport: str) -> bool:
        return time.monotonic() < self.late.get(transport, 0.0)

    def wants_for(self, begun: Begun, boxes: ShardLayout) -> dict[str, Any]:
        """On the sender: the engine's wants as told to the other ranks, unless all know them."""
        if begun.wants is not None:
            self.wants_digest, self._wants = begun.layout, begun.wants
        if all(known == begun.layout for known in boxes.knows):
            return {"digest": begun.layout, "wants": None}
        return {"digest": begun.layout, "wants": to_plain(self._wants)}

    def rounds(
        self, boxes: ShardLayout, told: Mapping[str, Any], info: WeightInfo, bucket_bytes: int
    ) -> tuple[BucketHeader, ...]:
        """What every rank sends to whom; ``told``: what ``wants_for`` said on the first rank."""
        as_sent = partial(laid_out, relays=told["relays"]) if "relays" in told else _as_it_is
        if "wants" not in told:  # all of it in buckets that every engine rank takes
            want: list[RankBoxes] = [{m.name: (Box.full(m.shape),) for m in boxes.metadata}]
            return self._plan((boxes.digest, "", bucket_bytes), boxes, want, _whole)
        if told["wants"] is not None and told["digest"] != self.wants_digest:
            self.wants_digest, self._wants = told["digest"], from_plain(Wants, told["wants"])
        assert self.wants_digest == told["digest"]
        # An alias is sent to whoever takes its owner, to be compared with it.
        want = [
            {**rank, **{a: rank[o] for a, o in info.aliases.items() if o in rank}}
            for rank in self._wants
        ]
        key = (boxes.digest, self.wants_digest, told.get("relays"), bucket_bytes)
        return self._plan(key, boxes, want, as_sent)

    def _plan(
        self,
        key: tuple[Any, ...],
        boxes: ShardLayout,
        want: Sequence[RankBoxes],
        as_sent: Callable[[BucketHeader], BucketHeader],
    ) -> tuple[BucketHeader, ...]:
        if self._planned is None or self._planned[0] != key:
            rounds = plan_rounds(boxes.metadata, boxes.have, want, key[-1])
            self._planned = (key, tuple(map(as_sent, rounds)))
            self.num_planned += 1
        return self._planned[1]


def _as_it_is(header: BucketHeader) -> BucketHeader:
    return header


def _whole(header: BucketHeader) -> BucketHeader:
    """A round to one rank that takes everything, with the entries that it sees."""
    entries = tuple(entry for message in header.messages for entry in message.entries)
    return replace(header, entries=entries, nbytes=max(m.stop for m in header.messages))


def shard_bytes(bucket_bytes: int) -> int:
    """The most of a shard that is compared, and sent, at once."""
    return min(bucket_bytes, MAX_SHARD)


def exchange_layout(
    source: Incoming,
    group: RankGroup,
    timeout: float,
    plans: PlanCache,
    copies: Committed,
    lying: Callable[[], Lying] = Lying,
) -> ShardLayout:
    """Tell each other what every rank holds; collective. Boxes travel when some have changed.

    ``source``: as ``agreed_source`` gave it, of the same tensors on every rank. ``lying``: whether
    the engine's ranks can read this rank's where they lie.
    """
    failure: RolloutError | None = None
    looked: _Look = ("", (), {})
    lies = Lying()
    try:
        looked = _look(source)
        if not looked[0]:
            lies = lying()
    except RolloutError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - the trainer's own code
        failure = source_failed(error, "")
    group.vote(failure, timeout, "layout")
    _, metadata, mine = looked
    status = {**_status(looked, plans, copies), "address": group.address, "lies": to_plain(lies)}
    said = group.exchange(status, timeout, "layout")
    problems = [
        f"on trainer rank {rank}, {s['problem']}" for rank, s in enumerate(said) if s["problem"]
    ]
    if problems:
        return ShardLayout(problems[0])
    knows = tuple(s["wants"] for s in said)
    kept = tuple(tuple(s["copies"]) for s in said)
    lies_at = [from_plain(Lying, s["lies"]) for s in said]
    found_at = *_mapped(group, lies_at), *_exchanged(group, lies_at)
    now = (knows, kept, tuple(s["host"] for s in said), said[0]["address"], *found_at)
    digest = digest_of([s["mine"] for s in said])
    if all(s["source"] == digest for s in said):
        known = plans.found(digest)
        assert known is not None
        return ShardLayout(known.problem, known.have, known.metadata, digest, *now)
    boxes = group.exchange({"boxes": mine}, timeout, "boxes")
    have = tuple(from_plain(Boxes, reply["boxes"]) for reply in boxes)
    found = ShardLayout(gap(metadata, have), have, metadata, digest, *now)
    plans.keep(found)
    return found


def _mapped(group: RankGroup, lies: Sequence[Lying]) -> tuple[str | None, tuple[str, ...]]:
    """Why not every rank's tensors can be read where they lie, and the GPUs that they lie on."""
    gpus = tuple({gpu: None for one in lies for gpu in one.gpus})
    for rank, one in zip(group.ranks, lies, strict=True):
        if one.not_mapped is not None:
            return one.not_mapped and f"on trainer rank {rank}, {one.not_mapped}", gpus
    return None, gpus


def _exchanged(group: RankGroup, lies: Sequence[Lying]) -> tuple[tuple[str, ...], str]:
    """Every rank's GPU, and why not all of them bring each other boxes."""
    gpus, first = tuple(one.here for one in lies), dict[str, int]()
    for rank, one in zip(group.ranks, lies, strict=True):
        if one.not_exchanged:
            return gpus, f"on trainer rank {rank}, {one.not_exchanged}"
        if one.here and first.setdefault(one.here, rank) != rank:  # NCCL refuses that
            return gpus, f"trainer ranks {first[one.here]} and {rank} are on one GPU"
    return gpus, ""


_Look = tuple[str, tuple[TensorMeta, ...], dict[str, Any]]


def _status(looked: _Look, plans: PlanCache, copies: Committed) -> dict[str, Any]:
    """What this rank tells the others before any box travels."""
    problem, metadata, mine = looked
    return {
        "problem": problem,
        "mine": digest_of([[[m.name, str(m.dtype), list(m.shape)] for m in metadata], mine]),
        "source": plans.source_digest,
        "wants": plans.wants_digest,
        "host": host_id(),
        "copies": [copies.epoch, copies.version, copies.cut, copies.since_full],
    }


def _look(source: Incoming) -> _Look:
    """What is in the way on this rank, or "", and its metadata and boxes."""
    metadata = source.metadata()
    if metadata is None:
        return "the source learns its tensors only while it gathers them", (), {}
    if not source.reads_locally:
        return f"{_kind(source)} cannot read its boxes without a gather", (), {}
    return "", metadata, to_plain(dict(source.local_boxes()))


def _kind(source: Any) -> str:
    """The class of the trainer's own source, beneath what reads and splits it."""
    while hasattr(source, "inner"):
        source = source.inner
    return type(source).__name__
