"""What the transports that form a group of trainer and engine ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollout.distributed import Rendezvous
from rollout.errors import ConfigError, DeadlineExceeded, RolloutError
from rollout.weight_sync.protocol.channel import WeightChannel

_GRACE = 1.0  # seconds in which a rank's own error may still explain a broken link
_BACKENDS = ("tcp", "nccl")


@dataclass(frozen=True, slots=True)
class GroupOffer:
    """Where the engine's ranks meet the sender."""

    rendezvous: Rendezvous


def check_group(where: Rendezvous, senders: int, num_ranks: int, device: str) -> None:
    """Refuse a group that the engine's ranks cannot be in."""
    if where.backend not in _BACKENDS:
        raise ConfigError(
            f"backend must be one of {', '.join(_BACKENDS)}, got {where.backend!r:.80}"
        )
    if where.backend == "nccl" and device.split(":")[0] != "cuda":
        raise ConfigError(f"the backend nccl needs a GPU, and the engine is on {device}")
    places = senders + num_ranks
    if where.size != places:
        raise ConfigError(
            f"the sender's group has {where.size} places, but {senders} sending and this "
            f"engine's {num_ranks} ranks need {places}: ask weight_info for the engine's size"
        )


@contextmanager
def explained(channel: WeightChannel, index: int = 0) -> Iterator[None]:
    """Raise the engine's own reason, where it tells one in time, for a link that broke here.

    ``index``: the bucket or round the link was carrying; 0 also while the group forms. The members
    learn of a broken link by whichever socket closes first, which says nothing of why.
    """
    try:
        yield
    except RolloutError as error:
        try:
            channel.wait(index, _GRACE)
        except DeadlineExceeded:
            pass
        except RolloutError as reason:
            raise reason from error
        raise
