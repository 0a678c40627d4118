"""``rollout plan --hosts``: what an update through a fleet's front would move.

Who is sent the bytes by whom is asked of ``updates.ways`` of a fleet, by which a front goes, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollout.errors import ConfigError
from rollout.fleet.updates.ways import AHEAD, FRONT, Way, ways
from rollout.rpc.status import CHUNK
from rollout.weight_sync.transports.shared_memory import MAX_HALF

_FRONTS = "0"  # name of its host


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTraffic:
    """What one update moves; bytes, without the padding of buckets. ``ways``: of each member, as
    the receipt has them. A host's figures are those of the one that carries most. Memory is beside
    what is there: ``host_memory_bytes`` of shared memory, ``member_memory_bytes`` of a rank, its
    shadow. ``seconds`` are the least, by the bandwidth of a host's link.
    """

    weight_bytes: int
    members: int
    hosts: int
    ways: Mapping[str, str]
    trainer_sends: int
    front_sends: int
    host_receives: int
    host_sends: int
    member_receives: int
    hops: int
    front_memory_bytes: int
    host_memory_bytes: int
    member_memory_bytes: int
    seconds: Mapping[str, float]


def plan_fleet(
    weight_bytes: int,
    rank_bytes: int,
    *,
    members: int,
    hosts: int,
    among: bool,
    gpu: bool,
    bucket_bytes: int,
    bandwidths: Sequence[float],
) -> FleetTraffic:
    """``rank_bytes``: of what the largest rank of a member holds. ``among``: the trainer and the
    front are on the first of the hosts; else each is on another. ``gpu``: ranks map no memory.
    """
    if not 0 < hosts <= members:
        raise ConfigError(f"--hosts must be 1..{members}, as many as there are engines at most")
    on = {f"member {n}": str(n * hosts // members + (not among)) for n in range(members)}
    places = {name: "" if gpu else host for name, host in on.items()}
    near = sum(place == _FRONTS for place in places.values())
    offered = among and near > 0
    found = ways(places, _FRONTS, places.keys(), offered=offered)
    fed = {name: way for name, way in found.items() if not way.maps}
    into, out = Counter[str](), Counter[str]()
    for name, way in fed.items():
        source = _FRONTS if way.feeder == FRONT else on[way.feeder]
        if source != on[name]:
            out[source] += weight_bytes
            into[on[name]] += weight_bytes
    hops = _hops(fed)
    bucket = min(bucket_bytes, weight_bytes)
    buckets = AHEAD * bucket
    late = max(1.0, (1 + hops * min(CHUNK, bucket) / bucket) / AHEAD)
    busiest = max([0 if among else weight_bytes, *into.values(), *out.values()])
    here = min(buckets, AHEAD * MAX_HALF)  # the segment that a trainer beside the front makes
    return FleetTraffic(
        weight_bytes=weight_bytes, members=members, hosts=hosts,
        ways={name: f"maps {way.maps}" if way.maps else way.feeder for name, way in found.items()},
        trainer_sends=weight_bytes,
        front_sends=sum(weight_bytes for way in fed.values() if way.feeder == FRONT),
        host_receives=max(into.values(), default=0),
        host_sends=max((n for host, n in out.items() if host != _FRONTS), default=0),
        member_receives=weight_bytes if fed else 0,
        hops=hops,
        front_memory_bytes=here if offered else buckets,
        host_memory_bytes=_most(on, fed) * buckets,
        member_memory_bytes=rank_bytes,
        seconds={f"{rate:g}": late * busiest / (rate * 1e9) for rate in bandwidths},
    )  # fmt: skip


def fleet_rows(traffic: FleetTraffic, size: Callable[[float], str]) -> list[tuple[str, str]]:
    t = traffic
    mapped = sum(way.startswith("maps ") for way in t.ways.values())
    return [
        ("weights", f"{size(t.weight_bytes)}"),
        ("fleet", f"{t.members} members on {t.hosts} hosts, {t.members - mapped} are sent the "
         f"bytes, {mapped} map memory of their host"),
        ("trainer to front", f"{size(t.trainer_sends)}"),
        ("front sends", f"{size(t.front_sends)}"),
        ("each host", f"receives {size(t.host_receives)}, sends at most {size(t.host_sends)}"),
        ("each member", f"reads {size(t.weight_bytes)}, of which its largest rank keeps "
         f"{size(t.member_memory_bytes)}"),
        ("hops", f"{t.hops} from the front to the last member"),
        ("more memory", f"{size(t.front_memory_bytes)} at the front, "
         f"{size(t.host_memory_bytes)} on another host, {size(t.member_memory_bytes)} on each rank "
         "for its shadow"),
        *((f"at {rate} GB/s", f"{seconds:.3g} s") for rate, seconds in t.seconds.items()),
    ]  # fmt: skip


def _hops(fed: Mapping[str, Way]) -> int:
    """From the front to the last of the chain."""
    hops: dict[str, int] = {FRONT: 0}
    for name, way in fed.items():
        hops[name] = hops[way.feeder] + 1
    return max(hops.values())


def _most(on: Mapping[str, str], fed: Mapping[str, Way]) -> int:
    """How many members of one host are sent bytes, each into memory of its own."""
    return max(Counter(on[name] for name in fed).values(), default=0)
