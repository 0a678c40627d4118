"""Which trainer rank sends which box of which tensor to which engine rank, in bounded rounds.

Pure: boxes in, headers out. The boxes that trainer ranks have are intersected with those that
engine ranks want; a box that several trainer ranks have is sent by one of them, whichever has
least to send so far; each engine rank gets every element that it wants once. Tensors of equal
shape and placement are intersected once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout.weight_sync.protocol.bucket import ALIGNMENT, MAX_ENTRIES
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader, Message
from rollout.weights import Box, Shape, TensorMeta
from rollout.weights.box import cut, disjoint

Boxes = tuple[Box, ...]
RankBoxes = Mapping[str, Boxes]  # one rank's boxes of each tensor, by file name


@dataclass(frozen=True, slots=True)
class Transfer:
    """Trainer rank ``src`` sends ``box`` of ``tensor`` to engine rank ``dst``."""

    tensor: TensorMeta
    box: Box
    src: int
    dst: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.tensor.dtype.itemsize


def plan_rounds(
    metadata: Sequence[TensorMeta],
    have: Sequence[RankBoxes],
    want: Sequence[RankBoxes],
    bucket_bytes: int,
) -> tuple[BucketHeader, ...]:
    """The rounds of one update of ``metadata`` from trainer ranks to engine ranks.

    In a round no rank sends or receives more than ``bucket_bytes``, alignment included. The same
    arguments give the same rounds on every rank. ``gap`` says beforehand whether ``have`` will do.
    """
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    return _rounds(transfers(metadata, have, want, limit), limit)


def transfers(
    metadata: Sequence[TensorMeta], have: Sequence[RankBoxes], want: Sequence[RankBoxes], most: int
) -> Iterator[Transfer]:
    """Every box that has to move, cut to at most ``most`` bytes, in the order of names."""
    planner = Planner()
    sent = [0] * len(have)
    for meta in sorted(metadata, key=lambda one: one.name):
        holders = held(meta.name, have)
        wanted = tuple(boxes.get(meta.name, ()) for boxes in want)
        elements = max(1, most // meta.dtype.itemsize)
        for index, dst, common in planner.common(tuple(holders), wanted):
            ranks = list(holders.values())[index]
            for box in cut(common, elements):
                src = min(ranks, key=sent.__getitem__)
                found = Transfer(meta, box, src, dst)
                sent[src] += found.nbytes
                yield found


class Planner:
    """Intersects what is held with what is wanted; equal questions are answered once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Boxes, tuple[Boxes, ...]], tuple[tuple[int, int, Box], ...]] = {}

    def common(self, holding: Boxes, wanted: tuple[Boxes, ...]) -> tuple[tuple[int, int, Box], ...]:
        """(index of the held box, engine rank, common box), for all that are not empty."""
        key = (holding, wanted)
        if key not in self._known:
            self._known[key] = tuple(
                (index, dst, box)
                for index, holds in enumerate(holding)
                for dst, boxes in enumerate(wanted)
                for takes in boxes
                if (box := holds.intersect(takes)) is not None and box.numel
            )
        return self._known[key]


def held(name: str, have: Sequence[RankBoxes]) -> dict[Box, tuple[int, ...]]:
    """The distinct boxes of a tensor and the trainer ranks that hold each, in rank order."""
    found: dict[Box, tuple[int, ...]] = {}
    for rank, boxes in enumerate(have):
        for box in boxes.get(name, ()):
            found[box] = (*found.get(box, ()), rank)
    return found


def gap(metadata: Sequence[TensorMeta], have: Sequence[RankBoxes]) -> str | None:
    """Why these boxes are not whole tensors, each element in one distinct box; None if they are."""
    tiled: set[tuple[Shape, Boxes]] = set()
    for meta in metadata:
        boxes = tuple(held(meta.name, have))
        if (meta.shape, boxes) in tiled:
            continue
        if any(not box.fits(meta.shape) for box in boxes):
            return f"a box of {meta.name} lies outside its shape {meta.shape}"
        if sum(box.numel for box in disjoint(boxes)) != sum(box.numel for box in boxes):
            return f"the trainer ranks' boxes of {meta.name} overlap"
        if sum(box.numel for box in boxes) != meta.numel:
            return f"no trainer rank holds all or a known box of {meta.name}"
        tiled.add((meta.shape, boxes))
    return None


def laid_out(header: BucketHeader, relays: Sequence[int]) -> BucketHeader:
    """A round with each message where it lies in the memory of its engine rank's relay: by the
    trainer rank that sends it, then by engine rank, as an exchange brings them.
    """
    ends: dict[int, int] = defaultdict(int)
    messages = []
    for message in sorted(header.messages, key=lambda one: (one.src, one.dst)):
        start = ends[relays[message.dst]]
        ends[relays[message.dst]] = start + aligned(message.nbytes)
        by = start - message.start
        entries = tuple(replace(entry, offset=entry.offset + by) for entry in message.entries)
        moved = Message(message.src, message.dst, start, message.stop + by, entries)
        messages.append(moved)
    return replace(header, messages=tuple(messages))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Room:
    """What each rank of one side still takes in each round, in bytes and entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: dict[tuple[int, int], tuple[int, int]] = {}
        self._first: dict[int, int] = defaultdict(int)  # earlier rounds are as good as full

    def first(self, rank: int) -> int:
        return self._first[rank]

    def fits(self, turn: int, rank: int, nbytes: int) -> bool:
        used, count = self._used.get((turn, rank), (0, 0))
        return used + nbytes <= self._limit and count < MAX_ENTRIES

    def take(self, turn: int, rank: int, nbytes: int) -> None:
        used, count = self._used.get((turn, rank), (0, 0))
        self._used[turn, rank] = (used + nbytes, count + 1)
        if turn == self._first[rank] and used + nbytes > self._limit * 7 // 8:
            self._first[rank] += 1


def _rounds(moves: Iterable[Transfer], limit: int) -> tuple[BucketHeader, ...]:
    """Each transfer in the first round in which both its ends have room."""
    sending, receiving = _Room(limit), _Room(limit)
    turns: dict[int, list[Transfer]] = defaultdict(list)
    for move in moves:
        size = aligned(move.nbytes)
        turn = max(sending.first(move.src), receiving.first(move.dst))
        while not (sending.fits(turn, move.src, size) and receiving.fits(turn, move.dst, size)):
            turn += 1
        sending.take(turn, move.src, size)
        receiving.take(turn, move.dst, size)
        turns[turn].append(move)
    return tuple(_header(i, turns[turn]) for i, turn in enumerate(sorted(turns)))


def _header(index: int, moves: Sequence[Transfer]) -> BucketHeader:
    """One message per pair of ranks; each engine rank's messages lie apart in its own part."""
    pairs: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for move in moves:
        pairs[move.dst, move.src].append(move)
    ends: dict[int, int] = defaultdict(int)
    messages = []
    for (dst, src), among in sorted(pairs.items(), key=lambda pair: pair[0]):
        start = end = aligned(ends[dst])
        entries = []
        for move in among:
            end, tensor = aligned(end), move.tensor
            entries.append(
                BucketEntry(tensor.name, tensor.dtype, tensor.shape, move.box, end, move.nbytes)
            )
            end += move.nbytes
        ends[dst] = end
        messages.append(Message(src, dst, start, end, tuple(entries)))
    return BucketHeader(index, (), sum(m.nbytes for m in messages), tuple(messages))
