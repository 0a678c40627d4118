"""The messages of one update: what a trainer and an engine say to each other as weights move.

    IDLE --begin--> STAGING --seal--> STAGED --all ranks vote yes--> COMMITTING --> IDLE at v+1
                       |                 |      (PREPARED: --decide-->)  |
                       +-- any failure, timeout, digest, missing --------+--> ABORTED: IDLE at v
                                                  a failure inside commit --> all ranks back to v
                                                  not possible            --> BROKEN

They travel through a ``WeightChannel`` (``channel.py``); a commit is answered by an
``UpdateReceipt`` (``receipts.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any

import torch
from msgspec import Meta

from rollout.errors import ConfigError, TransferFailed, shortened
from rollout.weights import Box, Shape, TensorMeta, WeightSlot
from rollout.weights.adapters import AdapterSpec
from rollout.weights.cells import CellGrid
from rollout.weights.components import POLICY, adapter_of
from rollout.weights.quantization import SCHEMES, Scheme
from rollout.weights.wanted import WantedWeights, by_name
from rollout.wire.codec import (
    ADDED,
    Count,
    Digest,
    Fence,
    Many,
    Positive,
    Seconds,
    Table,
    Text,
    from_plain,
    to_json,
)
from rollout.wire.version import FEATURES, PROTOCOL, Speaks, agreed

IN_FLIGHT = ("keep", "recompute", "abort", "wait", "pin")
PIN_FALLBACKS = ("keep", "recompute", "abort")
STAGING = ("auto", "device", "host", "none")
MIN_BUCKET_BYTES = 64  # one aligned entry
MAX_BUCKET_BYTES = 8 << 30
MAX_OFFER = 1 << 16  # bytes
MAX_DETAILS, MAX_DETAILS_SIZE = 64, 1 << 16  # of a seal: entries, and their characters
NO_CELL = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationGrid:
    """A scheme of ``rollout.weights.quantization``: what shares a scale; 0 columns: a whole row."""

    scheme: Text
    rows: Positive
    columns: Count

    @classmethod
    def of(cls, scheme: str) -> QuantizationGrid | None:
        """Of a scheme by its name; None for "none"."""
        found = SCHEMES.get(scheme)
        return None if found is None else cls(scheme=scheme, rows=found.rows, columns=found.columns)


def held_as(grid: QuantizationGrid | None, quantized: Iterable[str]) -> dict[str, Scheme]:
    """The scheme of each of the ``quantized`` tensors, as far as it is known here."""
    scheme = None if grid is None else SCHEMES.get(grid.scheme)
    return {} if scheme is None else dict.fromkeys(quantized, scheme)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInfo:
    """What an engine announces about its weights, before any update.

    ``tensors`` is the complete set that a full update must send, under checkpoint names and in the
    engine's dtype: the sender casts to it, and digests the result. ``aliases`` maps names that may
    be sent but belong to another tensor (a tied head) to their owner.
    """

    epoch: Digest
    version: Count
    label: Text | None
    state: Text  # idle | staging | staged | prepared | committing | broken | dead
    dtype: torch.dtype
    tensors: Many[TensorMeta]
    aliases: Table[Text]
    tensor_parallel_size: Positive
    device: Text
    transports: Many[Text]  # in order of preference, for a peer on another process
    last_update_id: Text = ""
    host: Text = ""  # of ``transports.host``; equal ids share memory, "" shares none
    undo: Text = "shadow"  # what a rollback goes back by: shadow | sparse | host
    memory: Table[Count] = field(default_factory=dict)  # bytes of the largest rank, by use
    zstd: bool = False  # whether changes may come compressed
    devices: Many[Text] = ()  # UUID of each rank's GPU, "" where it can share no memory
    # UUIDs of the GPUs whose memory every rank can map (of a fleet: each rank of some member).
    reaches: Many[Text] = field(default=(), metadata=ADDED)
    hosts: Many[Text] = field(default=(), metadata=ADDED)  # of a fleet: of members with ``reaches``
    prepared: Text = field(default="", metadata=ADDED)  # the update that waits for a decision
    fence: Count = field(default=0, metadata=ADDED)  # the highest fencing epoch that was seen
    # Those that an update may have tensors of.
    components: Many[Text] = field(default=(POLICY,), metadata=ADDED)
    # Of a fleet: what an open update still lacks that commits by itself, "" where there is none.
    incomplete: Text = field(default="", metadata=ADDED)
    # What names may begin with: ``weights.names.placed``.
    prefixes: Table[Text] = field(default_factory=dict, metadata=ADDED)
    # Tensors (``param``) that a trainer may have in memory in the place of those that they hold,
    # where no name tells (``weights.spellings.Spellings``).
    spelled: Many[WeightSlot] = field(default=(), metadata=ADDED)
    # How linears are held, whatever is sent; the tensors of which changes travel in whole cells.
    grid: QuantizationGrid | None = field(default=None, metadata=ADDED)
    quantized: Many[Text] = field(default=(), metadata=ADDED)
    # How many adapters are held, of which rank at most, and the newest version by name.
    max_adapters: Count = field(default=0, metadata=ADDED)
    max_lora_rank: Count = field(default=0, metadata=ADDED)
    adapters: Table[Count] = field(default_factory=dict, metadata=ADDED)
    adapter_digests: Table[Digest] = field(default_factory=dict, metadata=ADDED)
    # Adapters, as their sender calls them, that the live policy was merged from.
    merged: Many[Text] = field(default=(), metadata=ADDED)
    # Settings by which engines of the same weights compute other bits, as their flags have them.
    numerics: Table[Text] = field(default_factory=dict, metadata=ADDED)
    pipeline_parallel_size: Positive = field(default=1, metadata=ADDED)
    protocol: Count = PROTOCOL  # the newest that the engine speaks
    features: Many[Text] = FEATURES  # of ``wire.version``, as far as the engine has them

    @property
    def wanted(self) -> WantedWeights:
        return WantedWeights(
            dtype=self.dtype,
            tensors=by_name(self.tensors),
            aliases=self.aliases,
            prefixes=self.prefixes,
            spelled=self.spelled,
            schemes=self.schemes,
        )

    @property
    def num_ranks(self) -> int:
        """Of all stages of its pipeline."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def due(self) -> tuple[str, ...]:
        """The components that a policy's stream has to have: where all have to come, all it may."""
        further = self.wanted.routed if self.state == "broken" else ()
        return (POLICY, *dict.fromkeys(further))

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The scheme of each quantised tensor whose codes the engine takes."""
        if self.grid is None or "codes" not in self.features:
            return {}
        return held_as(self.grid, self.quantized)

    @property
    def cells(self) -> dict[str, tuple[int, int]]:
        """Rows and columns that share a scale, of each tensor of which the engine takes cells."""
        if "cells" not in self.features:
            return {}
        schemes, shapes = self.schemes, {meta.name: meta.shape for meta in self.tensors}
        return {
            name: CellGrid.of(shapes[name], scheme.cell(shapes[name])).cell
            for name, scheme in schemes.items()
            if prod(shapes[name])
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """Opens an update. ``base``: the (epoch, version) that the sender believes live, or None.

    ``metadata`` lists what will be sent, if the source knows it, and is checked before any byte
    moves; None: entries are checked as they arrive. ``partial``: what is not sent keeps its live
    value. ``offer`` says how the engine's ranks find the sender; only ``transport`` reads it.
    ``encoding`` is full or delta; a delta is built on ``base``, which must be live, and starts from
    a copy of it. "live" is the memory of an equal engine's ranks (``weight_io.raw_load``), whose
    digests are those of what it was made from. ``timeout`` bounds each wait, in seconds.
    ``components``: those that are sent, each whole unless ``partial``; the engine's others stay
    live. ``max_stall`` (seconds) and ``max_extra_memory`` (bytes on a rank's device) are limits:
    an update that would exceed one is refused before anything is staged. ``adapters``: those that
    are sent, by name; they are components, too, and always whole. ``adapters_after``: the version
    of every adapter that is to exist after the commit: sent ones get theirs, others must already be
    held in that version, and unnamed ones are unloaded. None: sent ones are added, as the update's
    version. ``merged``: see ``WeightInfo``; of the policy that is sent. ``in_flight="pin"`` lasts
    ``pin_timeout`` seconds (0: ``timeout``), after which ``pin_fallback`` applies.
    """

    update_id: Text
    version: Count | None = None
    base: tuple[Digest, Count] | None = None
    encoding: Text = "full"
    metadata: Many[TensorMeta] | None = None
    partial: bool = False
    transport: Text = "inline"
    offer: Table[Any] = field(default_factory=dict)
    bucket_bytes: Count
    staging: Text = "auto"
    in_flight: Text = "keep"
    label: Text | None = None
    timeout: Seconds
    protocol: Count = PROTOCOL
    components: Many[Text] = field(default=(POLICY,), metadata=ADDED)
    max_stall: Seconds | None = field(default=None, metadata=ADDED)
    max_extra_memory: Count | None = field(default=None, metadata=ADDED)
    adapters: Table[AdapterSpec] = field(default_factory=dict, metadata=ADDED)
    pin_timeout: Seconds = field(default=0.0, metadata=ADDED)
    pin_fallback: Text = field(default="keep", metadata=ADDED)
    adapters_after: Table[Count] | None = field(default=None, metadata=ADDED)
    merged: Many[Text] = field(default=(), metadata=ADDED)

    def adapter_version(self, name: str) -> int:
        """Of an adapter that is sent, where ``version`` is known."""
        assert self.version is not None
        return self.version if self.adapters_after is None else self.adapters_after[name]

    @property
    def models(self) -> tuple[str, ...]:
        """The components that are no adapters; none: what is live of the models stays."""
        return tuple(part for part in self.components if adapter_of(part) is None)

    @property
    def builds_on_live(self) -> bool:
        """Whether what is live of the policy serves on in part, or altogether."""
        return self.partial or POLICY not in self.components

    @classmethod
    def read(cls, plain: Any) -> UpdateRequest:
        """From its plain form; ``ConfigError`` where another version of the protocol wrote it."""
        if isinstance(plain, dict) and "protocol" in plain:
            agreed(Speaks.read(str(plain["protocol"])), "the sender of the update")
        request = from_plain(cls, plain)
        if len(to_json(request.offer)) > MAX_OFFER:
            raise TransferFailed(f"malformed UpdateRequest: its offer is over {MAX_OFFER} bytes")
        return request


Boxes = Table[Many[Box]]  # of one rank: file name -> disjoint boxes
Wants = Many[Boxes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mappers:
    """Who, of a fleet, maps a sender's GPU memory in one update.

    ``ranks``: how many, over all members. ``reaches``: UUIDs of the GPUs whose memory all of these
    can map. ``carries``: why buckets are to bring their bytes, too; "" where nobody needs them.
    """

    ranks: Positive
    reaches: Many[Text]
    carries: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The lease: the update will commit as ``version`` on top of ``base_version`` of ``epoch``.

    If trainer ranks will send to engine ranks directly: ``wants`` says what each engine rank takes,
    and ``layout`` is its digest; ``wants`` is None if the request showed that it is known.
    ``shared``: the offer of memory that an engine's neighbours read its buckets in. ``feed``: what
    a peer has to present that brings the buckets; "" where none may. ``mappers``: of an update by a
    GPU's memory through a fleet's front.
    """

    update_id: Text
    epoch: Digest
    base_version: Count
    version: Count
    layout: Text = ""
    wants: Wants | None = None
    shared: Table[Any] = field(default_factory=dict, metadata=ADDED)
    feed: Text = field(default="", metadata=ADDED)
    mappers: Mappers | None = field(default=None, metadata=ADDED)


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One box of one tensor inside a bucket: ``nbytes`` from ``offset``, row-major.

    ``sparse`` is 0 for a box of values. Otherwise the entry overwrites ``count`` elements of the
    box, with their gaps coded in ``sparse`` bytes each; see ``delta``. ``inflated`` is the length
    before compression, 0 if there is none. ``region``: the values are not in the payload but lie
    row-major from ``offset`` of that region of the bucket, where they are read in place. ``cell``:
    the entry replaces ``count`` cells of so many rows and columns; see ``cells``.
    """

    name: Text
    dtype: torch.dtype
    shape: Shape  # of the whole tensor
    box: Box
    offset: Count
    nbytes: Count
    sparse: Annotated[int, Meta(ge=0, le=8)] = 0
    count: Count = 0
    inflated: Count = 0
    region: Count | None = field(default=None, metadata=ADDED)
    cell: tuple[Count, Count] = field(default=NO_CELL, metadata=ADDED)

    @property
    def changed(self) -> int:
        """How many elements it brings."""
        if not self.sparse:
            return self.box.numel
        return self.count * max(1, self.cell[0] * self.cell[1])


@dataclass(frozen=True, slots=True)
class Message:
    """What trainer rank ``src`` sends to engine rank ``dst`` in one round, if all ranks send.

    It fills bytes ``start`` to ``stop`` of the receiver's part of the round; offsets of entries
    count from the beginning of that part.
    """

    src: Count
    dst: Count
    start: Count
    stop: Count
    entries: Many[BucketEntry]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """What bucket ``index`` (0, 1, 2 ...) holds; ``nbytes`` is the length of its payload.

    ``regions``: handles of the sender's memory that holds the entries, if ranks have to map it; of
    a round with messages those of the memory that each engine rank maps.
    A round in which all trainer ranks send has ``messages`` instead of entries; ``nbytes`` is their
    sum, and what one rank receives of it is its ``share``.
    """

    index: Count
    entries: Many[BucketEntry]
    nbytes: Count
    messages: Many[Message] = ()
    regions: Many[Text] = field(default=(), metadata=ADDED)

    @property
    def is_in_place(self) -> bool:
        """Whether nothing was packed: all entries lie in regions of the sender's memory."""
        return bool(self.entries) and all(entry.region is not None for entry in self.entries)

    def share(self, rank: int) -> BucketHeader:
        """This bucket as engine rank ``rank`` receives it."""
        if not self.messages:
            return self
        mine = tuple(m for m in self.messages if m.dst == rank)
        entries = tuple(entry for message in mine for entry in message.entries)
        end = max((m.stop for m in mine), default=0)
        return BucketHeader(self.index, entries, end, mine, self.regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """After the last bucket: how many buckets there were, and the sender's digest per tensor.

    With a ``fence`` (the fencing epoch of whoever will decide) a yes vote makes the engine
    PREPARED: it keeps what is staged without a stream, and accepts only a ``Decision`` of this
    epoch or a later one. ``label``: the version's, in the place of the request's, where it is known
    only now. ``details``: what the receipt says beside, at most 64 of them, of 65536 characters.
    """

    num_buckets: Count
    digests: Table[Digest]
    gather_seconds: Seconds = 0.0
    transfer_seconds: Seconds = 0.0
    wire_bytes: Count = 0
    details: Table[Text] = field(default_factory=dict)
    fence: Fence | None = field(default=None, metadata=ADDED)
    label: Text | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        size = sum(len(name) + len(text) for name, text in self.details.items())
        if len(self.details) > MAX_DETAILS or size > MAX_DETAILS_SIZE:  # receipts keep them
            raise ConfigError(
                f"a seal's details are {len(self.details)} of {size} characters: at most "
                f"{MAX_DETAILS} of {MAX_DETAILS_SIZE} together; say less of the update"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a PREPARED update; ``fence`` None: from an operator, who can only abort."""

    update_id: Text
    commit: bool
    fence: Fence | None
    reason: Text = ""

    def __post_init__(self) -> None:
        if self.commit and self.fence is None:
            raise ConfigError("a commit is decided under a fencing epoch")
        object.__setattr__(self, "reason", shortened(self.reason))
