"""What the roads that form a group of trainer and engine ranks share: how its errors are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollout.errors import DeadlineExceeded, RolloutError
from rollout.weight_sync.protocol.messages import WeightChannel

_GRACE = 1.0  # seconds in which a rank's own error may still explain a broken link


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
