"""A front's start: until enough members serve."""

from __future__ import annotations

import logging
import time

from rollout.errors import DeadlineExceeded
from rollout.fleet.fleet import Fleet

log = logging.getLogger(__name__)
GRACE = 15.0  # seconds for members that are being looked at when there are enough already
SAYS = (5.0, 30.0)  # seconds until the first line of the log, and between others


def gather(fleet: Fleet, timeout: float) -> None:
    """Returns once as many members serve as a commit needs, or all where there are fewer.

    Others join when they answer; one about which nothing is known yet is waited for a while.
    ``DeadlineExceeded`` after ``timeout`` seconds says why each does not serve.
    """
    deadline = time.monotonic() + timeout
    first, pause = SAYS
    while not fleet.wait(lambda: _lacking(fleet) <= 0, min(first, _left(deadline))):
        first = pause
        if not _left(deadline):
            raise DeadlineExceeded(
                f"{_count(fleet)} after {timeout:g} s: {fleet.whys() or 'none was added'}; look at "
                "these addresses, or give the front a lower --quorum or a longer --start-timeout; "
                f"engines that served by themselves do so again in {fleet.lease:g} s"
            )
        log.warning("%s: waiting for %.0f s more (--start-timeout)", _count(fleet), _left(deadline))
    fleet.wait(lambda: not fleet.has_new, min(GRACE, _left(deadline)))
    if fleet.quorum > fleet.num_members:
        log.warning(
            "no update can commit: the fleet has %d engines, and --quorum is %d; add more "
            "(POST /fleet/members), or start the front with a lower --quorum",
            fleet.num_members, fleet.quorum,
        )  # fmt: skip


def missing(fleet: Fleet) -> str:
    """Who is waited for and what to do, as ``gather`` goes on; "" once enough serve."""
    if _lacking(fleet) <= 0:
        return ""
    return (
        f"{_count(fleet)}: {fleet.whys() or 'none was added'}; start those that are missing, or "
        "the front with a lower --quorum"
    )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _lacking(fleet: Fleet) -> int:
    return max(1, min(fleet.quorum, fleet.num_members)) - len(fleet.serving())


def _count(fleet: Fleet) -> str:
    serving = len(fleet.serving())
    return (
        f"{serving} of the fleet's {fleet.num_members} engines serve, and "
        f"{serving + _lacking(fleet)} are needed to begin"
    )
