"""The sockets between the ranks of a group: one from the first rank to each of the others."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from rollout import errors
from rollout.distributed.life_lines import closed_in_forks
from rollout.errors import DeadlineExceeded, TransferFailed, some
from rollout.wire import frames


class Star:
    """Frames over the links of one member; errors name the ``ranks`` of the trainer's job.

    ``links``: by member index, to the first member or, on that one, to all others.
    """

    def __init__(self, ranks: tuple[int, ...], links: Mapping[int, socket.socket]) -> None:
        self.ranks = ranks
        self.links = {index: closed_in_forks(link) for index, link in links.items()}
        self.early: dict[int, frames.Frame] = {}  # what ``heard`` has read of a peer

    def send(
        self,
        index: int,
        header: dict[str, Any],
        timeout: float,
        phase: str,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        link = self._link(index, phase)
        try:
            link.settimeout(max(0.01, timeout))
            frames.send_frame(link, header, tensors)
        except TimeoutError:
            raise self.late({index}, phase) from None
        except OSError as error:
            raise TransferFailed(
                f"trainer rank {self.ranks[index]} is gone, at {phase!r}: {error}"
            ) from error

    def receive(self, index: int, timeout: float, phase: str) -> frames.Frame:
        link = self._link(index, phase)
        if index in self.early:
            return self.early.pop(index)
        try:
            link.settimeout(max(0.01, timeout))
            frame = frames.recv_frame(link)
        except TimeoutError:
            raise self.late({index}, phase) from None
        except (OSError, TransferFailed) as error:  # between frames, or within one
            raise TransferFailed(
                f"trainer rank {self.ranks[index]} is gone, at {phase!r}: {error}"
            ) from error
        if frame is None:
            raise TransferFailed(f"trainer rank {self.ranks[index]} is gone, at {phase!r}")
        return frame

    def late(self, members: set[int], phase: str) -> DeadlineExceeded:
        names = some([str(self.ranks[i]) for i in sorted(members)])
        return DeadlineExceeded(
            f"trainer rank {names} did not reach {phase!r} within the timeout; "
            "is every rank of the source calling update_weights?"
        )

    def heard(self) -> errors.RolloutError | None:
        """How a peer has failed meanwhile, if one has; blocks for a second at most."""
        for index, link in self.links.items():
            if index not in self.early and _readable(link):
                try:
                    self.early[index] = self.receive(index, 1.0, "gather")
                except errors.RolloutError as lost:
                    return lost
            header = self.early[index][0] if index in self.early else {}
            status = header.get("status")
            said = header.get("error") or (isinstance(status, dict) and status.get("error"))
            if said:
                return errors.from_wire(said)
        return None

    def tell_all(self, header: dict[str, Any]) -> None:
        """As far as it goes within a second each; from any thread that no other call disturbs."""
        for link in self.links.values():
            with suppress(OSError):
                link.settimeout(1.0)
                frames.send_frame(link, header)

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.links.clear()

    def _link(self, index: int, phase: str) -> socket.socket:
        try:
            return self.links[index]
        except KeyError:
            raise TransferFailed(
                f"the group of trainer ranks was closed by an earlier error, at {phase!r}"
            ) from None


def _readable(link: socket.socket) -> bool:
    with selectors.DefaultSelector() as ready:
        ready.register(link, selectors.EVENT_READ)
        return bool(ready.select(0))
