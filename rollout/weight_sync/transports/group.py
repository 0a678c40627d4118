"""What the roads over a process group of trainer and engine ranks share: its errors and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollout.errors import DeadlineExceeded, RolloutError
from rollout.updates import WeightChannel

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


def drop(held: list[object]) -> None:
    """Empty ``held``: a group and its work, without waiting for what ends only at its timeout.

    NCCL leaves a kernel waiting for a peer that is gone, unless it is told to abort.
    """

    def end() -> None:
        for one in held:
            if "NCCL" in type(one).__name__ and hasattr(one, "abort"):
                one.abort()
        held.clear()

    with suppress(RuntimeError):  # no memory for a thread: then it goes with its last reference
        threading.Thread(target=end, name="drop-group", daemon=True).start()
