"""Full or delta, for one update: what the caller wants, what the engine holds, what is worth it."""

from __future__ import annotations

import os

from torch import Tensor

from rollout.weight_sync.protocol import zstd
from rollout.weight_sync.protocol.delta import CodedDelta, Committed, DeltaBase
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.transports import is_near, same_host

DENSE = 0.5  # of full's bytes: above it "auto" finds that deltas are not worth their memory
REST = 8  # updates before "auto" tries again
_MEMORY_SHARE = 4  # "auto" keeps a copy where it takes at most 1 / this of the free memory


class Encoder:
    """Chooses the encoding of one update and of each of its tensors; the sender's alone.

    ``base`` None: nothing lives between updates, so everything is full. ``settle`` after the
    commit; an encoder that is dropped before leaves no copy behind.
    """

    def __init__(self, options: UpdateOptions, info: WeightInfo, base: DeltaBase | None) -> None:
        self._info, self._base, self._options = info, base, options
        self._keeps, self.reason = _keeps(options, info, base)
        self._held = base.take() if base is not None else Committed()
        self.encoding = "full"
        self.spread = False  # every trainer rank keeps and compares its own part
        self.compress = options.encoding == "delta-zstd" and zstd.available() and info.zstd
        if not self._keeps:
            self._held = Committed()
        else:
            self._judge(self._held.is_live(info.epoch, info.version), self._held.since_anchor)

    @property
    def may_spread(self) -> bool:
        """Whether it is worth asking trainer ranks for what they hold of the weights."""
        return self._keeps and not self._options.partial

    def spread_over(self, live: bool, since_anchor: int) -> None:
        """Every trainer rank has a copy of its own part, all of them ``live`` or not."""
        self._held, self.spread = Committed(), True
        self._judge(live, since_anchor)
        self.reason += "; each trainer rank compares its own part"

    def _judge(self, live: bool, since_anchor: int) -> None:
        every = self._options.anchor_every
        if not live or self._info.state == "broken":
            self.fall_back("the engine does not hold what this sender last committed")
        elif self._options.staging == "none":
            self.fall_back("a delta needs staging")
        elif 0 < every <= since_anchor + 1:
            self.encoding, self.reason = "full", f"an anchor, every {every}"
        else:
            self.encoding, self.reason = "delta", "built on the live version"
            if self._options.encoding == "delta-zstd" and not self.compress:
                where = "here" if not zstd.available() else "on the engine's host"
                self.reason += f", not compressed: zstd is not installed {where}"

    @property
    def keeps_all(self) -> bool:
        """Whether this sender keeps a copy of everything, which has to pass by here for it."""
        return self._keeps and not self.spread

    @property
    def compressed(self) -> bool:
        return self.compress and self.encoding == "delta"

    @property
    def base(self) -> tuple[int, int] | None:
        """What the engine must hold for this update to fit, (epoch, version)."""
        # Copies are those of the live version, or there is no delta.
        return (self._info.epoch, self._info.version) if self.encoding == "delta" else None

    def fall_back(self, reason: str) -> None:
        """Send everything; before the first tensor alone."""
        self.encoding, self.reason = "full", reason
        self._held = Committed()

    def send_whole(self, reason: str) -> None:
        """Send everything and keep nothing: whole tensors do not pass by here."""
        self.fall_back(reason)
        self._keeps = self.spread = False

    def delta(self, name: str, tensor: Tensor, max_bytes: int) -> CodedDelta | None:
        """The change of one tensor, or None to send it whole; its copy is brought up to date."""
        # An alias is compared with its owner by the engine: it goes whole, and is not kept.
        if not self._keeps or self.spread or name in self._info.aliases:
            return None
        if self.encoding == "delta":
            found = self._held.delta(name, tensor.cpu(), max_bytes)
            return None if found is None else found.coded(compress=self.compress)
        self._held.keep(name, tensor)
        return None

    def settle(self, epoch: int, version: int, wire_bytes: int, num_bytes: int) -> None:
        """The update is live: what was kept is the base of the next one."""
        if self._base is None:
            return
        self._base.rest = max(0, self._base.rest - 1)
        if not self._keeps:
            return
        if self.encoding == "delta" and too_dense(self._options, wire_bytes, num_bytes):
            self._base.rest = REST
            return
        if self.spread:
            return
        held = self._held
        held.since_anchor = held.since_anchor + 1 if self.encoding == "delta" else 0
        held.epoch, held.version = epoch, version
        self._base.put(held)


def too_dense(options: UpdateOptions, wire_bytes: int, num_bytes: int) -> bool:
    """Whether "auto" stops keeping copies, as most elements of this update's delta changed."""
    return options.encoding == "auto" and wire_bytes > DENSE * num_bytes


def _keeps(options: UpdateOptions, info: WeightInfo, base: DeltaBase | None) -> tuple[bool, str]:
    """Whether to keep a copy of what is sent, and if not, why."""
    if options.encoding == "full":
        return False, "asked for"
    if base is None:
        return False, "nothing is kept between updates here"
    if options.encoding in ("delta", "delta-zstd"):
        return True, ""
    if same_host(info) or is_near(info):
        return False, "on one host the bytes are cheaper than finding out which of them changed"
    if not info.device.startswith("cpu"):
        return False, "the engine's device takes full tensors faster than its host finds changes"
    if base.rest:
        return False, "most elements changed lately"
    if sum(meta.nbytes for meta in info.tensors) * _MEMORY_SHARE > _free_memory():
        return False, "memory for a copy of the weights is short"
    return True, ""


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
