"""By which way each member of a fleet gets an update's bytes; decided without I/O.

Hosts form a chain: the front sends to the first, and each takes what comes on to the next while it
comes. In a chain every uplink, the front's too, carries one copy, so with bytes under way
everywhere at once it is as fast as one link, a little later at each hop (a chunk of 2 MiB); two
buckets of 64 MiB under way keep thirty hosts busy. A tree of fan-out 2 has fewer hops, but its
inner hosts send two copies, beside the tokens that they serve, at half the speed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

FRONT = "the front"
CARD = "the trainer's GPU"
AHEAD = 2  # buckets under way to every member


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Of one member: it ``maps`` memory of the front's host, of the trainer's GPU or of another
    member, or is sent the bytes, by ``feeder``, a member, or the front. ``shares``: others map what
    it receives; ``relays``: it may be fed, and feed the next.
    """

    maps: str = ""
    feeder: str = FRONT
    shares: bool = False
    relays: bool = False


def ways(
    places: Mapping[str, str],
    here: str,
    able: Collection[str],
    *,
    offered: bool,
    cards: Collection[str] = (),
) -> dict[str, Way]:
    """Of each member, by name and in this order.

    ``places``: the memory that its ranks can map, "" for none; ``here``: that of the front's host,
    where the trainer or the front has some if ``offered``. ``able``: who can relay. ``cards``: who
    maps the trainer's GPU.
    """
    firsts: dict[str, str] = {}
    found: dict[str, Way] = {}
    for name, place in places.items():
        if name in cards:
            found[name] = Way(maps=CARD)
        elif offered and place and place == here:
            found[name] = Way(maps=FRONT)
        elif place and place != here and firsts.setdefault(place, name) != name:
            found[name] = Way(maps=firsts[place])
    fed = [name for name in places if name not in found]
    chain = [name for name in fed if name in able]
    before = followers(chain) if len(chain) > 1 else {}
    mapped = {way.maps for way in found.values()}
    for name in fed:
        relays = len(chain) > 1 and name in able
        found[name] = Way(
            feeder=before.get(name, FRONT), relays=relays,
            shares=name in mapped or (relays and bool(places[name])),
        )  # fmt: skip
    return {name: found[name] for name in places}


def followers(chain: Iterable[str]) -> dict[str, str]:
    """Who feeds each but the first."""
    return {after: name for name, after in pairwise(chain)}
