"""``rollout plan``: what an update would move, from configs alone; no weights, no processes.

The same intersection of boxes as a "p2p" update's (``trainer/reshard_plan.py``), over the tables
of models without memory. Tensors of equal shape and placement are planned once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from rollout.cli.flags import Row, add_rows
from rollout.cli.plan_fleet import fleet_rows, plan_fleet
from rollout.cli.tables import print_table
from rollout.config import DEFAULT_BUCKET_BYTES
from rollout.errors import ConfigError
from rollout.weights import Box, Shape, TensorMeta
from rollout.weights.box import interval_boxes

Holders = Mapping[Box, tuple[int, ...]]  # a box of one tensor -> the trainer ranks that hold it
Wanted = tuple[tuple[Box, ...], ...]  # of one tensor, by rank of one engine
BANDWIDTHS = (3.0, 25.0, 50.0)  # GB/s: 25 gigabit Ethernet, 200 and 400 gigabit fabrics
MAX_RANKS = 1 << 16
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
PLAN: tuple[Row, ...] = (
    ("--dtype", ("bfloat16", "float16", "float32"), None, "of the engine (default: the config's)"),
    ("--expert-parallel", "", False, "whole experts on each engine rank"),
    ("--bucket-mib", "N", DEFAULT_BUCKET_BYTES >> 20, "MiB of a bucket"),
    ("--hosts", "N", 0, "through a fleet's front, its members spread over N hosts"),
    (
        "--front",
        ("apart", "among"),
        "apart",
        "with --hosts: whether trainer and front are on the first of them, or each on another",
    ),
    ("--gpu", "", False, "with --hosts: members on GPUs, which share no memory"),
    ("--json", "", False, "one JSON object, with every link"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one update moves; bytes. ``links`` are one engine's, [trainer rank, its rank, bytes];
    every engine has the same. ``busiest`` counts what one rank sends to, or takes from, all."""

    tensors: int
    weight_bytes: int
    trainer_ranks: int
    engines: int
    tensor_parallel_size: int
    total_bytes: int
    links: tuple[tuple[int, int, int], ...]
    busiest_link: tuple[int, int, int]
    busiest_sender: tuple[int, int]
    busiest_receiver: tuple[int, int]
    rounds: int
    trainer_peak_bytes: int
    rollout_peak_bytes: int
    seconds: Mapping[str, float]


def add_plan(commands: Any, add_command: Any) -> None:
    """Register the command; ``add_command`` makes a subparser as the others have it."""
    parser = add_command(commands, "plan", run, "say what an update would move, from configs alone")
    for name, form, text in (
        (
            "--trainer",
            "KIND:N",
            "the trainer: fsdp:256 | hsdp:4x64 (replicas x shards) | zero3:256 | ddp:8",
        ),
        ("--rollout", "tp:NxE", "the engines: tp:8x32 is 32 of 8 ranks each"),
        ("--model", "MODEL", "config.json, or a directory with one"),
    ):
        parser.add_argument(name, required=True, metavar=form, help=text)
    parser.add_argument(
        "--bandwidth", type=float, nargs="+", default=BANDWIDTHS, metavar="GB/S",
        help="of each rank's link, in each direction (default: 3 25 50)",
    )  # fmt: skip
    add_rows(parser, PLAN)


def run(args: argparse.Namespace) -> int:
    if args.bucket_mib < 1 or any(not rate > 0 for rate in args.bandwidth):
        raise ConfigError("--bucket-mib and --bandwidth must be positive")
    if args.hosts:
        return _run_fleet(args)
    if args.gpu or args.front != "apart":
        raise ConfigError("--gpu and --front say where members of a fleet are: give --hosts, too")
    traffic = plan_traffic(
        args.model,
        trainer=args.trainer,
        rollout=args.rollout,
        dtype=args.dtype,
        expert_parallel=args.expert_parallel,
        bucket_bytes=args.bucket_mib << 20,
        bandwidths=args.bandwidth,
    )
    if args.json:
        print(json.dumps(asdict(traffic)))
    else:
        print_table(_rows_of(traffic))
    return 0


def plan_traffic(
    model: str, *, trainer: str, rollout: str, dtype: str | None = None,
    expert_parallel: bool = False, bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    bandwidths: Sequence[float] = BANDWIDTHS,
) -> Traffic:  # fmt: skip
    """Plan one update of every engine at once; ``bandwidths`` in 10^9 bytes per second."""
    replicas, shards, place = _trainer(trainer)
    size, engines = _rollout(rollout)
    metadata, wanted = _wants(model, size, dtype, expert_parallel)
    holders = _holders(metadata, partial(place, replicas=replicas, shards=shards))
    links = _links(metadata, holders, wanted, (replicas, size), bucket_bytes)
    sent: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for (src, dst), nbytes in links.items():
        sent[src] += nbytes
        taken[dst] += nbytes
    (sender, out), (receiver, into) = sent.most_common(1)[0], taken.most_common(1)[0]
    link, most = links.most_common(1)[0]
    busiest = max(out * engines, into)
    return Traffic(
        tensors=len(metadata),
        weight_bytes=sum(meta.nbytes for meta in metadata),
        trainer_ranks=replicas * shards,
        engines=engines,
        tensor_parallel_size=size,
        total_bytes=sum(links.values()) * engines,
        links=tuple((src, dst, n) for (src, dst), n in sorted(links.items())),
        busiest_link=(*link, most),
        busiest_sender=(sender, out * engines),
        busiest_receiver=(receiver, into),
        rounds=-(-max(out, into) // bucket_bytes),
        # Two buffers of a round per engine that is being sent to; a part being received, and the
        # shadow that it is loaded into.
        trainer_peak_bytes=2 * min(bucket_bytes, out) * engines,
        rollout_peak_bytes=min(bucket_bytes, into) + into,
        seconds={f"{rate:g}": busiest / (rate * 1e9) for rate in bandwidths},
    )


def _run_fleet(args: argparse.Namespace) -> int:
    _trainer(args.trainer)  # whatever it is, it sends once
    size, engines = _rollout(args.rollout)
    metadata, wanted = _wants(args.model, size, args.dtype, args.expert_parallel)
    ranks = [
        sum(box.numel * meta.dtype.itemsize for meta in metadata for box in wanted[meta.name][rank])
        for rank in range(size)
    ]
    traffic = plan_fleet(
        sum(meta.nbytes for meta in metadata), max(ranks), members=engines, hosts=args.hosts,
        among=args.front == "among", gpu=args.gpu, bucket_bytes=args.bucket_mib << 20,
        bandwidths=args.bandwidth,
    )  # fmt: skip
    if args.json:
        print(json.dumps(asdict(traffic)))
    else:
        print_table(fleet_rows(traffic, _size))
    return 0


def _trainer(text: str) -> tuple[int, int, Callable[..., dict[Box, tuple[int, ...]]]]:
    """Replicas, shards and who holds what of ``fsdp:N``, ``hsdp:RxN``, ``zero3:N`` or ``ddp:N``."""
    match = re.fullmatch(r"(fsdp|zero3|ddp):(\d+)|hsdp:(\d+)x(\d+)", text)
    if match is None:
        raise ConfigError(
            f"--trainer {text!r}: expected fsdp:N, hsdp:RxN, zero3:N or ddp:N (ZeRO-1 and 2 hold "
            "whole weights, as ddp)"
        )
    kind, count, replicas, shards = match.groups()
    pair = (int(replicas), int(shards)) if kind is None else (1, int(count))
    place = _intervals if kind == "zero3" else _rows
    return *_bounded(pair[::-1] if kind == "ddp" else pair, "--trainer"), place


def _rollout(text: str) -> tuple[int, int]:
    """(ranks of an engine, engines) of ``tp:N`` or ``tp:NxE``."""
    match = re.fullmatch(r"tp:(\d+)(?:x(\d+))?", text)
    if match is None:
        raise ConfigError(f"--rollout {text!r}: expected tp:N or tp:NxE")
    return _bounded((int(match[1]), int(match[2] or 1)), "--rollout")


def _bounded(pair: tuple[int, int], flag: str) -> tuple[int, int]:
    if not 0 < pair[0] * pair[1] <= MAX_RANKS:
        raise ConfigError(f"{flag}: the number of ranks must be 1..{MAX_RANKS}")
    return pair


def _wants(
    model: str, size: int, dtype: str | None, expert_parallel: bool
) -> tuple[tuple[TensorMeta, ...], dict[str, Wanted]]:
    """The tensors in file form, and what each rank of one engine takes of each."""
    from rollout.distributed import TensorParallel
    from rollout.models.build import build_model
    from rollout.models.config.model import ModelConfig
    from rollout.weights.box import disjoint

    config = _config(model, ModelConfig)
    kinds = [config.kind_of(i) for i in range(config.num_layers)]
    shown = {kind: kinds.index(kind) for kind in set(kinds)}  # layers of one kind are equal
    few = replace(config, num_layers=1 + max(shown.values()))
    kind = config.dtype if dtype is None else getattr(torch, dtype)
    metadata: tuple[TensorMeta, ...] = ()
    takes: dict[str, list[tuple[Box, ...]]] = {}
    for rank in range(size):
        part = build_model(
            few, TensorParallel(rank, size), kind, "meta", expert_parallel=expert_parallel
        )
        metadata = metadata or part.weight_metadata()
        for name, slots in part.table.slots.items():
            takes.setdefault(name, []).append(disjoint(slot.take for slot in slots))
    shared: dict[Wanted, Wanted] = {}
    wanted = {name: shared.setdefault(tuple(boxes), tuple(boxes)) for name, boxes in takes.items()}
    everything = dict(_all_layers(metadata, [shown[kind] for kind in kinds]))
    return (
        tuple(replace(meta, name=name) for name, meta in everything.items()),
        {name: wanted[meta.name] for name, meta in everything.items()},
    )


def _all_layers(
    metadata: Sequence[TensorMeta], like: Sequence[int]
) -> Iterator[tuple[str, TensorMeta]]:
    """Names of all layers in order, and the tensor each is like: layer i's are ``like[i]``'s."""
    layers: dict[int, list[tuple[str, str, TensorMeta]]] = {}
    after: list[TensorMeta] = []
    for meta in metadata:
        match = _LAYER.fullmatch(meta.name)
        if match is not None:
            layers.setdefault(int(match[2]), []).append((match[1], match[3], meta))
        elif layers:
            after.append(meta)
        else:
            yield meta.name, meta
    for index, shown in enumerate(like):
        for before, rest, meta in layers[shown]:
            yield f"{before}{index}{rest}", meta
    for meta in after:
        yield meta.name, meta


def _config(model: str, kind: Any) -> Any:
    path = Path(model)
    if path.is_dir():
        return kind.from_directory(path)
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: no config.json can be read there: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--model {model}: not an object")
    return kind.from_hf(values, file=model)


def _holders(
    metadata: Sequence[TensorMeta], place: Callable[[Shape], dict[Box, tuple[int, ...]]]
) -> dict[str, Holders]:
    """Parts of each tensor as a trainer has it in memory (experts fused), seen in file form."""
    from rollout.weights.spellings import Spellings

    spellings = Spellings.of({meta.name: meta.shape for meta in metadata})
    known: dict[Any, Holders] = {}

    def shared(holders: dict[Box, tuple[int, ...]]) -> Holders:
        return known.setdefault(tuple(holders.items()), holders)

    found: dict[str, Holders] = {}
    for fused in spellings.fused.values():
        parts: dict[str, dict[Box, tuple[int, ...]]] = {}
        for box, ranks in place(fused.shape).items():
            for name, inside in fused.split_box(box, fused.shape):
                parts.setdefault(name, {})[inside] = ranks
        found.update((name, shared(holders)) for name, holders in parts.items())
    by_shape = {
        meta.shape: place(meta.shape)
        for meta in {m.shape: m for m in metadata if m.name not in found}.values()
    }
    return {m.name: found[m.name] if m.name in found else by_shape[m.shape] for m in metadata}


def _rows(shape: Shape, replicas: int, shards: int) -> dict[Box, tuple[int, ...]]:
    """What ``fully_shard`` makes: equal runs of rows, of which the last ranks may have none."""
    step = -(-shape[0] // shards)
    return {
        Box((start, *(0 for _ in shape[1:])), (min(start + step, shape[0]), *shape[1:])): tuple(
            replica * shards + index for replica in range(replicas)
        )
        for index, start in enumerate(range(0, shape[0], step))
    }


def _intervals(shape: Shape, replicas: int, shards: int) -> dict[Box, tuple[int, ...]]:
    """What ZeRO-3 makes: equal runs of the flattened tensor; ``replicas`` is 1."""
    numel = prod(shape)
    step = -(-numel // shards)
    return {
        box: (index,)
        for index, start in enumerate(range(0, numel, step))
        for box in interval_boxes(shape, start, min(start + step, numel))
    }


def _links(
    metadata: Sequence[TensorMeta],
    holders: Mapping[str, Holders],
    wanted: Mapping[str, Wanted],
    sizes: tuple[int, int],
    bucket_bytes: int,
) -> Counter[tuple[int, int]]:
    """Bytes from each trainer rank to each rank of one engine."""
    from rollout.weight_sync.trainer.reshard_plan import Planner
    from rollout.weights.box import cut

    planner, links = Planner(), Counter[tuple[int, int]]()
    if sizes[0] > 1:  # replicas share the sending: box by box, to whoever has sent least
        sent: Counter[int] = Counter()
        for meta in sorted(metadata, key=lambda one: one.name):
            held, size = holders[meta.name], meta.dtype.itemsize
            ranks = list(held.values())
            for index, dst, common in planner.common(tuple(held), wanted[meta.name]):
                for box in cut(common, max(1, bucket_bytes // size)):
                    src = min(ranks[index], key=sent.__getitem__)
                    sent[src] += box.numel * size
                    links[src, dst] += box.numel * size
        return links
    groups: Counter[tuple[int, int, int]] = Counter()
    first: dict[tuple[int, int, int], TensorMeta] = {}
    for meta in metadata:
        key = (id(holders[meta.name]), id(wanted[meta.name]), meta.dtype.itemsize)
        groups[key] += 1
        first.setdefault(key, meta)
    for key, count in groups.items():
        held = holders[first[key].name]
        ranks = list(held.values())
        for index, dst, box in planner.common(tuple(held), wanted[first[key].name]):
            links[ranks[index][0], dst] += box.numel * key[2] * count
    return links


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    raise AssertionError


def _rows_of(traffic: Traffic) -> list[tuple[str, str]]:
    size = _size
    volumes = sorted(n for _, _, n in traffic.links)
    middle, engines = volumes[len(volumes) // 2], traffic.engines
    (src, dst, most), (sender, sent) = traffic.busiest_link, traffic.busiest_sender
    receiver, taken = traffic.busiest_receiver
    spread = f"{size(volumes[0])} to {size(volumes[-1])}, median {size(middle)}"
    peaks = size(traffic.trainer_peak_bytes), size(traffic.rollout_peak_bytes)
    return [
        ("weights", f"{size(traffic.weight_bytes)} in {traffic.tensors} tensors"),
        ("trainer", f"{traffic.trainer_ranks} ranks"),
        ("rollout", f"{engines} engines of {traffic.tensor_parallel_size} ranks"),
        ("on the wire", f"{size(traffic.total_bytes)}, the least that those ranks need"),
        ("links", f"{len(volumes)} of each engine: {spread}"),
        ("busiest link", f"{size(most)}, trainer rank {src} to rank {dst} of each engine"),
        ("busiest sender", f"{size(sent)}, trainer rank {sender}, to all engines"),
        ("busiest receiver", f"{size(taken)}, rank {receiver} of each engine"),
        ("rounds", f"{traffic.rounds} at least, per engine"),
        ("peak memory", f"{peaks[0]} more on a trainer rank, {peaks[1]} on an engine's, its "
         "shadow included"),
        *((f"at {rate} GB/s", f"{seconds:.3g} s") for rate, seconds in traffic.seconds.items()),
    ]  # fmt: skip
