"""An adapter is forgotten by a transaction: on every rank, and of a fleet on every member."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

from rollout.config import DEFAULT_TIMEOUT
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import MIN_BUCKET_BYTES, Seal, UpdateRequest


def unload(
    adapters: Mapping[str, int], open_channel: Callable[[], WeightChannel], name: str
) -> bool:
    """An update that brings nothing, and after which ``name`` is not there; whether it was.

    ``adapters``: what is there, by version. It makes a version, so that a member that misses it is
    fenced and catches up; there is no way back from it, nor from what was committed before.
    """
    after = dict(adapters)
    if after.pop(name, None) is None:
        return False
    channel = open_channel()
    try:
        channel.begin(
            UpdateRequest(
                update_id=uuid.uuid4().hex, components=(), adapters_after=after,
                bucket_bytes=MIN_BUCKET_BYTES, timeout=DEFAULT_TIMEOUT,
            )
        )  # fmt: skip
        channel.seal(Seal(num_buckets=0, digests={}))
        channel.commit()
    finally:
        channel.close()
    return True
