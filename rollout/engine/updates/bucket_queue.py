"""The buckets of one update that the ranks have been told of and have not taken yet."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from torch import Tensor

from rollout.engine.core import EngineCore
from rollout.engine.executors import gather_replies
from rollout.weight_sync.protocol.messages import BucketHeader
from rollout.wire.codec import to_json
from rollout.wire.frames import Reply

_AHEAD = 2  # buckets in flight per sender, and as many again


class BucketQueue:
    """Announces buckets to all ranks, in the order of the calls, and waits for them by index."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._waiting: dict[int, list[Future[Reply]]] = {}
        self._carried: list[int] = []  # header hashes of the buckets that carried their bytes
        self._connecting: list[Future[Reply]] | None = None
        self.count = 0  # that were announced

    def connect(self, update_id: str) -> None:
        """The ranks go on to meet the sender; their replies are due before the first bucket's."""
        self._connecting = self._engine.call("stage_connect", {"update_id": update_id})

    @property
    def waiting(self) -> list[int]:
        """Indices of what has been announced, lowest first."""
        return sorted(self._waiting)

    def is_full(self, senders: int) -> bool:
        """Whether one should be waited for before the next: ranks' queues stay bounded."""
        return len(self._waiting) >= _AHEAD * senders + _AHEAD

    def comes_again(self, header: BucketHeader) -> bool:
        """Whether a bucket that carries its bytes was taken before; otherwise remember it.

        Judged by index and header: had its bytes changed, the digests at the seal would tell.
        """
        if header.index < len(self._carried):
            return self._carried[header.index] == hash(header)
        if header.index == len(self._carried):
            self._carried.append(hash(header))
        return False

    def announce(
        self,
        update_id: str,
        header: BucketHeader,
        carried: Mapping[str, Tensor] | None,
        *,
        plain: bool = True,
    ) -> None:
        """``carried``: its bytes, where they travel with it. ``plain`` False: the only rank is in
        this process, and takes the header as it is.
        """
        self.count += 1
        plain = plain and not (header.is_in_place and self._engine.reads_on)
        args = {"update_id": update_id, "header": to_json(header).decode() if plain else header}
        self._waiting[header.index] = self._engine.call("stage_bucket", args, carried)

    def wait(self, index: int, timeout: float) -> None:
        """Until every rank has met the sender and taken bucket ``index``; raises a rank's error."""
        if self._connecting is not None:
            gather_replies(self._connecting, "connect", timeout)
            self._connecting = None
        futures = self._waiting.pop(index, None)
        if futures is not None:
            gather_replies(futures, f"bucket {index}", timeout)
