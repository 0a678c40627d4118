"""Buckets in POSIX shared memory, for a trainer on the host of the engine's ranks (CPU).

The sender owns one file in /dev/shm with a page of identification and two halves, and packs its
buckets straight into the halves: one copy there, and one on each rank into its parameters. The
announcement on the channel carries the header alone.

The file's name is gone as soon as every rank has mapped it, so nothing is left behind however
anybody dies; what a sender killed before that left is removed by the next one. Ranks map the file
privately from a read-only descriptor. GPU memory does not travel this way.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import BucketHeader, UpdateRequest, WeightInfo
from rollout.weight_sync.transports.base import (
    Accepted,
    EngineRank,
    Holding,
    Opening,
    Receiver,
    Sender,
    Transport,
    offer_of,
)
from rollout.weight_sync.transports.host import SHARED_MEMORY, host_id
from rollout.weights import TensorMeta
from rollout.wire.codec import Positive, Text

# Each bucket costs messages to every engine: halves are long where there is room. Both take half of
# /dev/shm, of which container runtimes give 64 MB by default, or what is left there.
MAX_HALF = 32 << 20
_MIN_HALF = 1 << 20

_PAGE = 4096
_MARK = struct.Struct("<16s32sQ")  # mark, secret, bytes of a half
_MAGIC = b"rollout-ipc-1"
_NAME = re.compile(r"rollout-ipc-([0-9]{1,10})-[0-9a-f]{32}")
_SECRET = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """Where the buckets are: the offer of this transport.

    ``name`` is a plain file name, never a path. The file is one page that begins with a mark and
    ``secret``, then two halves of ``half`` bytes; bucket i lies at the start of half i % 2.
    """

    name: Text
    secret: Text
    half: Positive


class SharedMemory(Transport):
    name = "ipc"
    shared = True

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return "same host, and its /dev/shm is this one"

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        near = info.host and info.host == host_id()
        return None if near else "the engine is on another host"

    def open(self, opening: Opening) -> Sender:
        return IpcSender(opening.info.tensors, opening.bucket_bytes, opening.senders)

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        shared = offer_of(SharedFile, request)
        if problem := shared_problem(shared, request.bucket_bytes):
            raise ConfigError(f"the shared memory {shared.name!r:.100} is refused: {problem}")
        return Accepted()

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        return IpcReceiver(offer_of(SharedFile, request), at.rank, request.bucket_bytes)


class IpcSender(Sender):
    """Creates the shared file.

    ``buffers``: the two halves, no longer than ``bucket_bytes`` (in whole pages) or the update.
    """

    bytes_go = "memory"

    def __init__(
        self,
        tensors: Iterable[TensorMeta] | None,
        bucket_bytes: int,
        senders: int = 1,
        most: int | None = None,
    ) -> None:
        """``tensors``: all that is sent, None where that is unknown. ``senders``: trainer ranks
        that write, all of which have it mapped by the first ``send``. ``most``: the longest half,
        by default as there is room.
        """
        self._alone = senders == 1
        _sweep()
        if most is None:
            most = _longest_half()
        needed = most if tensors is None else sum(meta.nbytes + _PAGE for meta in tensors)
        half = _pages(min(bucket_bytes, needed, most))
        name = f"rollout-ipc-{os.getpid()}-{secrets.token_hex(16)}"
        self.shared = SharedFile(name=name, secret=secrets.token_hex(16), half=half)
        self._fd: int | None = None
        self.offer = asdict(self.shared)
        self.buffers = self._create()

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        channel.wait(0, timeout)
        if self._alone:
            self.forget()

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        self.put(header, payload)
        channel.bucket(header, None)

    def put(self, header: BucketHeader, payload: Tensor) -> None:
        """Have a bucket lie in its half, which is free; everybody has the memory mapped."""
        self.forget()
        half = self.buffers[header.index % 2]
        if header.nbytes > half.numel():
            raise TransferFailed(
                f"bucket {header.index} of {header.nbytes} bytes does not fit the shared "
                f"{half.numel()}"
            )
        if half.data_ptr() != payload.data_ptr():
            half[: header.nbytes].copy_(payload)

    def close(self) -> None:
        self.forget()
        self.buffers = ()

    @classmethod
    def of_packed(cls, request: UpdateRequest) -> IpcSender:
        """For an update whose buckets somebody else packs, as long as the request lets them be."""
        return cls(request.metadata, request.bucket_bytes, most=request.bucket_bytes)

    def _create(self) -> tuple[Tensor, ...]:
        shared, size = self.shared, _PAGE + 2 * self.shared.half
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(SHARED_MEMORY / shared.name, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Reserved now: on a full mount a later write would end the process instead of failing.
            os.posix_fallocate(self._fd, 0, size)
            memory = mmap.mmap(self._fd, size)
        except BaseException as error:
            self.forget()
            if not isinstance(error, OSError | OverflowError):  # the latter: more than any mount
                raise
            raise TransferFailed(
                f"{size} bytes of shared memory cannot be had: {error}; make {SHARED_MEMORY} "
                "larger, bucket_bytes smaller, or use transport='broadcast'"
            ) from error
        memory[: _MARK.size] = _MARK.pack(_MAGIC, shared.secret.encode(), shared.half)
        return _halves(memory, shared)

    def forget(self) -> None:
        """Remove the name; the memory lives while somebody has it mapped."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with suppress(FileNotFoundError):
            os.unlink(SHARED_MEMORY / self.shared.name)
        os.close(fd)


class SharedWriter:
    """A trainer rank's mapping of the memory that the first one has created."""

    def __init__(self, shared: SharedFile) -> None:
        self._shared = shared
        self.buffers: tuple[Tensor, ...] = ()

    def connect(self) -> None:
        self.buffers = _halves(_mapped(self._shared, writes=True), self._shared)

    def close(self) -> None:
        self.buffers = ()


class IpcReceiver:
    """Maps the sender's file after checking whose it is, and reads each bucket where it lies."""

    def __init__(self, shared: SharedFile, rank: int, bucket_bytes: int) -> None:
        self._shared, self._rank, self._limit = shared, rank, bucket_bytes
        self._memory: Tensor | None = None

    def connect(self, timeout: float) -> None:
        shared = self._shared
        if problem := shared_problem(shared, self._limit):
            raise _refused(shared, problem, f"rank {self._rank}")
        memory = _mapped(shared, f"rank {self._rank}")
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        if carried is not None:
            return carried  # whoever wrote to the memory is gone
        return half_of(self._memory, _PAGE, self._shared.half, header, self._rank)

    def close(self) -> None:
        self._memory = None  # unmapped when the last view of it is gone


def shared_problem(shared: SharedFile, bucket_bytes: int) -> str | None:
    """What is wrong with announced memory of the host, before anybody opens it; else None."""
    if not _NAME.fullmatch(shared.name) or not _SECRET.fullmatch(shared.secret):
        return "its name or secret is malformed"
    if shared.half % _PAGE or not 0 < shared.half <= _pages(bucket_bytes):
        return f"halves of {shared.half} bytes were not agreed on"
    return None


def _longest_half() -> int:
    """One of few lengths: a trainer keeps its plans of updates, which are made for one."""
    mount = os.statvfs(SHARED_MEMORY)
    size, left = mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize
    half = MAX_HALF
    while size and half > _MIN_HALF and (4 * half > size or 2 * half + _PAGE > left):
        half //= 2
    return half


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _mapped(shared: SharedFile, who: str = "", *, writes: bool = False) -> mmap.mmap:
    """The sender's file, after checking whose it is; ``TransferFailed`` where it is another."""
    size = _PAGE + 2 * shared.half
    # Private for who reads, so that no write of theirs could reach the file; unwritten pages are
    # the sender's own.
    flags = mmap.MAP_SHARED if writes else mmap.MAP_PRIVATE
    try:
        with _opened(shared.name, os.O_RDWR if writes else os.O_RDONLY) as fd:
            if problem := _file_problem(fd, size):
                raise _refused(shared, problem, who)
            memory = mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise _refused(shared, str(error), who) from error
    magic, secret, half = _MARK.unpack_from(memory)
    known = hmac.compare_digest(secret, shared.secret.encode())
    if magic.rstrip(b"\0") != _MAGIC or not known or half != shared.half:
        raise _refused(shared, "it is not marked as this update's", who)
    return memory


def _refused(shared: SharedFile, why: str, who: str = "") -> TransferFailed:
    said = f"the shared memory {shared.name!r:.100} is refused: {why}"
    return TransferFailed(f"{who}: {said}" if who else said)


def _halves(memory: mmap.mmap, shared: SharedFile) -> tuple[Tensor, ...]:
    whole = torch.frombuffer(memory, dtype=torch.uint8)[_PAGE:]
    return whole[: shared.half], whole[shared.half :]


@contextmanager
def _opened(name: str, mode: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of a file right in the shared-memory mount; follows no link."""
    fd = os.open(SHARED_MEMORY / name, mode | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _file_problem(fd: int, size: int) -> str | None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return "it is no plain file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"others may open it (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_size != size:
        return f"it has {found.st_size} bytes, announced were {size}"
    return None


def _sweep() -> None:
    """Remove files of this user whose sender was killed before every rank had mapped them."""
    for path in SHARED_MEMORY.glob("rollout-ipc-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or _alive(int(match[1])):
            continue
        with suppress(OSError), _opened(path.name) as fd:
            # The kernel drops a dead process's lock. A process of another pid namespace looks
            # dead from here but holds its own.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid == os.geteuid():
                os.unlink(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def half_of(
    memory: Tensor | None, first: int, half: int, header: BucketHeader, rank: int
) -> Tensor:
    """The bytes of a bucket in mapped ``memory`` of two halves from byte ``first`` on.

    uint8, [header.nbytes], a view. ``TransferFailed`` when the memory is gone or too small.
    """
    if memory is None:
        raise TransferFailed(f"rank {rank}: aborted before bucket {header.index}")
    if header.nbytes > half:
        raise TransferFailed(
            f"rank {rank}: bucket {header.index} of {header.nbytes} bytes does not fit "
            f"the shared {half}"
        )
    start = first + header.index % 2 * half
    return memory[start : start + header.nbytes]
