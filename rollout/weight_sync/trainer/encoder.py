"""Full or delta: what the caller wants, what the engine holds, and what pays off."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from rollout.errors import ConfigError
from rollout.weight_sync.protocol import zstd
from rollout.weight_sync.protocol.committed import Committed, DeltaBase
from rollout.weight_sync.protocol.delta import CodedDelta
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.local_shards import LocalShards
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.shard_layout import ShardLayout
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.transports import is_near, same_host
from rollout.weights import Box, TensorMeta
from rollout.weights.packed_rows import packed_shape

DENSE = 0.5  # of full's bytes: above it "auto" finds that deltas are not worth their memory
REST = 8  # updates before "auto" tries again
_MEMORY_SHARE = 4  # "auto" keeps a copy where it takes at most 1 / this of the free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How one update is encoded; the first rank chooses, and every rank follows.

    ``keeps``: whose copy of what was sent is the base of the next delta: "first", the first rank's,
    of everything; "each", every rank's, of its own shards; "" where nothing is kept.
    """

    name: str  # full | delta
    reason: str
    keeps: str = ""
    compress: bool = False

    @property
    def title(self) -> str:
        """As the receipt names it."""
        return self.name + ("-zstd" if self.compress and self.name == "delta" else "")

    def full(self, reason: str) -> Encoding:
        """Send everything instead."""
        return replace(self, name="full", reason=reason)


def choose_encoding(
    options: UpdateOptions,
    info: WeightInfo,
    base: DeltaBase | None,
    copies: Committed,
    layout: ShardLayout | None,
) -> Encoding:
    """On the first rank. ``copies``: its own; ``layout``: what all ranks hold, if exchanged.

    Raises ``ConfigError`` where changes are to be compressed and a side cannot.
    """
    compress = options.encoding == "delta-zstd"
    if compress and not (zstd.available() and info.zstd):
        where = "on the engine's host" if zstd.available() else "here"
        raise ConfigError(
            f"encoding='delta-zstd', but zstd is not installed {where}: pip install zstandard (the "
            "extra `zstd`), or use encoding='delta'"
        )
    why_not = _why_nothing_is_kept(options, info, base)
    if why_not is not None:
        return Encoding(name="full", reason=why_not)
    if layout is not None and info.quantized and len(layout.copies) > 1:
        return Encoding(
            name="full",
            reason="the engine's weights are quantised: part of a tensor's changes are not enough",
        )
    if layout is not None and layout.problem is None and not options.partial:
        cut = layout.cut(options.bucket_bytes)
        without = [why for held in layout.copies if (why := _no_base(info, cut, *held[:3]))]
        name, reason = _full_or_delta(options, info, without, layout.copies[0][3])
        reason += "; each trainer rank compares its own part"
        return Encoding(name=name, reason=reason, keeps="each", compress=compress)
    version = copies.version if copies.values else -1
    why = _no_base(info, "", copies.epoch, version, copies.cut)
    name, reason = _full_or_delta(options, info, [why] if why else [], copies.since_full)
    return Encoding(name=name, reason=reason, keeps="first", compress=compress)


def _full_or_delta(
    options: UpdateOptions, info: WeightInfo, no_base: list[str], since_full: int
) -> tuple[str, str]:
    every = options.anchor_every
    if info.state == "broken":
        return "full", "the engine is broken, which a full update alone mends"
    if no_base:
        return "full", no_base[0]
    if options.staging == "none":
        return "full", "a delta needs staging"
    if 0 < every <= since_full + 1:
        return "full", f"an anchor, every {every}"
    return "delta", "built on the live version"


def _no_base(info: WeightInfo, cut: str, epoch: int, version: int, was_cut: str) -> str | None:
    """Why what one rank keeps is not what a delta can be built on; None where it is.

    ``epoch``, ``version`` (-1: it keeps nothing) and ``was_cut`` are its ``Committed``'s.
    """
    if version < 0:
        return (
            "this sender has nothing to compare with: it is its first update by this encoding, or "
            "the one before failed; the next one can be a delta"
        )
    if epoch != info.epoch:
        return "the engine has restarted since this sender's last commit"
    if version != info.version:
        return (
            f"the engine does not hold what this sender last committed: version {info.version} is "
            f"live, by another commit or a rollback, and what is kept here is version {version}"
        )
    if cut != was_cut:
        return "the trainer's shards, bucket_bytes or partial= are not those of its last update"
    return None


class Encoder:
    """Encodes one rank's pieces, and keeps copies of them, which are lost unless it commits."""

    def __init__(
        self, options: UpdateOptions, info: WeightInfo, base: DeltaBase | None, copies: Committed,
        encoding: Encoding, *, is_first: bool,
    ) -> None:  # fmt: skip
        self._options, self._aliases, self._base = options, info.aliases, base
        self._quantized, self._schemes = frozenset(info.quantized), info.schemes
        self._metas = {m.name: m for m in info.tensors} if info.quantized else {}
        self._cells = info.cells
        delta = encoding.name == "delta"
        self._copies = copies if delta else Committed()
        self._memory = {} if delta else copies.values  # of old copies, for new ones
        self.encoding = encoding
        self._keeps = encoding.keeps == "each" or (encoding.keeps == "first" and is_first)

    def encode(self, piece: Piece, max_bytes: int) -> Piece | CodedDelta:
        """What changed of a piece since the last commit; the whole piece if that is shorter."""
        by_shards = self.encoding.keeps == "each"
        # An alias is compared with its owner by the engine: it goes whole, and is not kept.
        if not self._keeps or piece.name in self._aliases:
            return piece
        if self.encoding.name == "full":
            if not by_shards:  # they are kept when the update has committed
                self._keep(piece)
            return piece
        if piece.name in self._quantized:
            return self._encode_cells(piece, max_bytes)
        change = self._copies.change(piece.name, piece.box, piece.values, max_bytes)
        if change is None:
            return piece
        return change.coded(piece.shape, piece.box, compress=self.encoding.compress)

    def _encode_cells(self, piece: Piece, max_bytes: int) -> Piece | CodedDelta:
        """What shares a scale with what changed of a quantised tensor's floats; of codes, and
        where the engine takes no cells, everything if anything changed.
        """
        if piece.box.shape != tuple(piece.shape):
            self._copies.keep(piece.name, piece.box, piece.values)
            return piece
        self._forget_other(piece)
        compress, cell = self.encoding.compress, self._cells.get(piece.name)
        if cell is not None and _are_floats(piece, self._metas[piece.name]):
            cells = self._copies.changed_cells(piece.name, piece.values, cell, max_bytes)
            return piece if cells is None else cells.coded(compress=compress)
        change = self._copies.change(piece.name, piece.box, piece.values, max_bytes)
        if change is None or len(change.values):
            return piece
        return change.coded(piece.shape, piece.box, compress=compress)

    def _forget_other(self, piece: Piece) -> None:
        """Of a tensor that came as codes the copy of its floats, or the other way round: what is
        live is the newest of them."""
        shape, scheme = self._metas[piece.name].shape, self._schemes.get(piece.name)
        if scheme is not None:
            shapes = {shape, packed_shape(shape, scheme)} - {tuple(piece.shape)}
            for other in shapes:
                self._copies.values.pop((piece.name, Box.full(other)), None)

    def settle(self, receipt: UpdateReceipt, shards: LocalShards | None) -> None:
        """The update is live: what was sent is the base of the next one."""
        if self._base is None:
            return
        self._base.rest = max(0, self._base.rest - 1)
        if not self._keeps:
            return
        delta, copies = self.encoding.name == "delta", self._copies
        if delta and self._too_dense(receipt):
            self._base.rest = REST
            return
        if self.encoding.keeps == "each":
            assert shards is not None
            copies.cut = shards.cut
            if not delta:
                for piece in shards.pieces():
                    if not piece.values.is_meta:
                        self._keep(piece)
        copies.since_full = copies.since_full + 1 if delta else 0
        copies.epoch, copies.version = receipt.epoch, receipt.version
        self._base.put(copies)

    def _keep(self, piece: Piece) -> None:
        into = self._memory.pop((piece.name, piece.box), None)
        self._copies.keep(piece.name, piece.box, piece.values, into)

    def _too_dense(self, receipt: UpdateReceipt) -> bool:
        """Whether "auto" stops keeping copies, as most elements of this update changed."""
        return self._options.encoding == "auto" and receipt.wire_bytes > DENSE * receipt.num_bytes


def _are_floats(piece: Piece, held: TensorMeta) -> bool:
    """Whether a quantised tensor comes as the floats whose digest the engine has."""
    return (tuple(piece.shape), piece.values.dtype) == (held.shape, held.dtype)


def _why_nothing_is_kept(
    options: UpdateOptions, info: WeightInfo, base: DeltaBase | None
) -> str | None:
    if options.encoding == "full":
        return "asked for"
    if base is None:
        return "nothing is kept between updates here"
    if options.encoding in ("delta", "delta-zstd"):
        return None
    if same_host(info) or is_near(info):
        return "on one host the bytes are cheaper than finding out which of them changed"
    if not info.device.startswith("cpu"):
        return "the engine's device takes full tensors faster than changes are found"
    if base.rest:
        return "most elements changed lately"
    if sum(meta.nbytes for meta in info.tensors) * _MEMORY_SHARE > _free_memory():
        return "memory for a copy of the weights is short"
    return None


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
