"""CUDA IPC as far as it goes without a card: what travels, is refused, and taken instead."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch

from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.messages import UpdateRequest, WeightInfo
from rollout.weight_sync.trainer.shard_layout import ShardLayout
from rollout.weight_sync.transports import cuda_ipc, find, lent_memory, ways
from rollout.weight_sync.transports.base import EngineRank
from rollout.weight_sync.transports.broadcast import choose_backend
from rollout.weight_sync.transports.cuda_ipc import (
    FLAGS,
    CudaIpcReceiver,
    SharedAllocation,
    unpack_handle,
    why_not,
)
from rollout.weight_sync.transports.cuda_memory import Allocation, Runtime, gpu_uuid, pack_handle
from rollout.weight_sync.transports.host import host_id
from rollout.weight_sync.transports.lent_memory import released, wait_released
from rollout.weights import Box, TensorMeta
from rollout.wire.codec import from_plain, to_plain

UUID, SECRET = str(uuid4()), "00112233445566778899aabbccddeeff"
HANDLE = bytes(range(64))
SIZE = FLAGS + 2 * FLAGS


def _info(host: str | None = None, devices: tuple[str, ...] = (UUID,)) -> WeightInfo:
    return WeightInfo(
        epoch=1,
        version=0,
        label=None,
        state="idle",
        dtype=torch.bfloat16,
        tensors=(TensorMeta("w", torch.bfloat16, (4, 4)),),
        aliases={},
        tensor_parallel_size=1,
        device="cuda:0",
        transports=("broadcast", "inline", "ipc"),
        host=host_id() if host is None else host,
        devices=devices,
    )


DRIVER = r"""
#include <stdbool.h>
#include <stddef.h>
int cuPointerGetAttributes(unsigned count, int *attributes, void **data, unsigned long long at) {
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i] == 11) *(unsigned long long *)data[i] = at < 4096 ? 0 : at - at % 4096;
        if (attributes[i] == 12) *(size_t *)data[i] = 123456;
        if (attributes[i] == 10) *(bool *)data[i] = at < 8192;
    }
    return 0;
}
"""


def test_the_driver_is_asked_for_an_allocation_in_one_call(tmp_path: Path) -> None:
    """As its header has it, of which this one stands in for the library."""
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    command = [shutil.which("cc") or "gcc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    runtime = Runtime.__new__(Runtime)
    runtime._driver = ctypes.CDLL(str(library))
    assert runtime.around(4100) == Allocation(4096, 123456, shareable=True)
    assert runtime.around(9000) == Allocation(8192, 123456, shareable=False)
    with pytest.raises(TransferFailed, match="knows nothing of the address 0x10"):
        runtime.around(16)


def test_a_handle_survives_its_wire_form() -> None:
    packed = pack_handle(UUID, SIZE, SECRET, HANDLE)
    shared = SharedAllocation(secret=SECRET, half=FLAGS, handle=packed)
    assert from_plain(SharedAllocation, to_plain(shared)) == shared
    assert unpack_handle(packed, SIZE, SECRET) == (UUID, HANDLE)


def test_what_a_rank_announces_of_its_gpus_survives_its_wire_form() -> None:
    info = _info(devices=(UUID, ""))
    assert from_plain(WeightInfo, to_plain(info)).devices == (UUID, "")


@pytest.mark.parametrize(
    ("text", "size", "secret", "why"),
    [
        ("", SIZE, SECRET, "0 bytes"),
        ("zz", SIZE, SECRET, "non-hex"),
        (pack_handle(UUID, SIZE, SECRET, HANDLE)[:-2], SIZE, SECRET, "bytes, not"),
        (pack_handle(UUID, SIZE, SECRET, HANDLE), SIZE + 1, SECRET, "announced were"),
        (pack_handle(UUID, SIZE, SECRET, HANDLE), SIZE, SECRET[::-1], "not marked"),
        ("00" * 16 + pack_handle(UUID, SIZE, SECRET, HANDLE)[32:], SIZE, SECRET, "not marked"),
    ],
)
def test_a_handle_that_is_not_this_updates_is_refused(
    text: str, size: int, secret: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        unpack_handle(text, size, secret)


@pytest.mark.parametrize(
    ("half", "handle", "why"),
    [
        (FLAGS + 1, "", "not agreed on"),
        (1 << 40, "", "not agreed on"),
        (FLAGS, "00", "bytes, not"),
        (FLAGS, pack_handle(UUID, SIZE, SECRET, HANDLE), "does not see the GPU"),
    ],
)
def test_a_rank_refuses_memory_that_it_cannot_trust_or_reach(
    half: int, handle: str, why: str
) -> None:
    shared = SharedAllocation(secret=SECRET, half=half, handle=handle)
    receiver = CudaIpcReceiver(shared, 0, FLAGS, torch.device("cuda", 0))
    with pytest.raises(TransferFailed, match=why):
        receiver.connect(1.0)


class Cuda:
    """Allocations of 4096 bytes at 4096 times a handle's first byte; in place of torch's part, a
    region is the object that a tensor would keep alive.
    """

    def __init__(self) -> None:
        self.open_now: list[int] = []

    def open(self, handle: bytes) -> int:
        self.open_now.append(4096 * handle[0])
        return self.open_now[-1]

    def close(self, pointer: int) -> None:
        self.open_now.remove(pointer)

    def around(self, pointer: int) -> Allocation:
        return Allocation(pointer, 4096, shareable=True)


def test_a_buckets_regions_are_unmapped_with_the_last_view_and_none_reaches_beyond_what_was_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda()
    torch_ = SimpleNamespace(cuda=SimpleNamespace(device=lambda _: nullcontext()))
    torch_.as_tensor = lambda region, device: region
    monkeypatch.setattr(lent_memory, "torch", torch_)
    monkeypatch.setattr(lent_memory.cuda_memory, "runtime", lambda: cuda)
    reads = SimpleNamespace(synchronize=lambda: None)
    wanted = [(4096, bytes([index]) * 64) for index in (1, 2)]

    def mapped(sizes_and_handles: list[tuple[int, bytes]]) -> list[Any]:
        regions = lent_memory.MappedRegions(SECRET, torch.device("cpu"), reads, torch.zeros(1))
        return list(regions.map_all(sizes_and_handles))

    first, second = mapped(wanted)
    assert [first.pointer, second.pointer] == [4096, 8192]
    del first
    assert cuda.open_now == [4096, 8192]
    del second
    assert not cuda.open_now
    with pytest.raises(TransferFailed, match="4096 bytes were mapped, 4097 announced"):
        mapped([*wanted, (4097, bytes([3]) * 64)])
    assert not cuda.open_now


def test_memory_is_free_when_no_rank_has_it_open() -> None:
    flags = torch.zeros(FLAGS, dtype=torch.uint8)
    assert released(flags)
    flags[3] = 1
    assert not released(flags)
    flags[3] = 2
    assert released(flags)


def test_memory_is_kept_while_a_rank_may_be_about_to_open_it(monkeypatch) -> None:
    monkeypatch.setattr(lent_memory, "OPEN_WAIT", 20.0)
    flags, over = torch.tensor([2, 2], dtype=torch.uint8), threading.Event()
    assert not released(torch.tensor([2, 0], dtype=torch.uint8), 0.0)
    started = time.monotonic()
    assert wait_released(flags, over)  # both have closed it: at once
    assert time.monotonic() - started < 20
    monkeypatch.setattr(lent_memory, "OPEN_WAIT", 0.5)
    flags[1] = 0  # it never came
    started = time.monotonic()
    assert wait_released(flags, over)
    assert time.monotonic() - started >= 0.5
    flags[1] = 0  # it maps the memory, is slow, and sets its flag
    timers = [threading.Timer(at, flags.__setitem__, (1, to)) for at, to in ((0.1, 1), (1.0, 2))]
    for timer in timers:
        timer.start()
    started = time.monotonic()
    assert wait_released(flags, over)
    assert time.monotonic() - started >= 1.0 - 0.1
    flags[1] = 1
    over.set()  # the program ends: it is not waited for
    assert not wait_released(flags, over)


def test_a_cpu_has_no_uuid() -> None:
    assert gpu_uuid(torch.device("cpu")) == ""


def test_a_gpu_on_another_host_is_reached_in_another_way() -> None:
    assert why_not(_info(host="elsewhere")) == "the engine is on another host"
    found = ways("auto", _info(host="elsewhere"))
    assert [way.transport.name for way in found] == ["broadcast", "inline"]
    assert found[0].reason == "no ipc: the engine is on another host"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
def test_without_a_gpu_here_it_is_refused_and_auto_takes_another() -> None:
    assert why_not(_info()) == "this process has no GPU"
    assert ways("auto", _info())[0].transport.name == "broadcast"
    with pytest.raises(ConfigError, match="this process has no GPU"):
        ways("ipc", _info())


def test_a_mig_slice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on one announces no UUID."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "MIG" in (why_not(_info(devices=("",))) or "")
    assert "MIG" in (why_not(_info(devices=(UUID, ""))) or "")


def test_one_gpu_for_both_sides_is_no_place_for_nccl() -> None:
    assert choose_backend("cuda:0", True, True) == "tcp"
    assert choose_backend("cuda:0", True, False) == "nccl"


def test_a_rank_takes_the_flag_that_its_engine_was_dealt() -> None:
    """Behind a fleet's front, where several engines map the memory; of more than the sender looks
    at none.
    """
    handle = pack_handle(UUID, SIZE, SECRET, HANDLE)
    shared = SharedAllocation(secret=SECRET, half=FLAGS, handle=handle, flags=4, first=3)
    assert shared.gpu == UUID
    with pytest.raises(TransferFailed, match="flags for 4 ranks"):
        CudaIpcReceiver(shared, 1, FLAGS, torch.device("cuda", 0)).connect(1.0)
    with pytest.raises(TransferFailed, match="does not see the GPU"):
        CudaIpcReceiver(shared, 0, FLAGS, torch.device("cuda", 0)).connect(1.0)


def test_the_offer_says_nothing_new_to_an_engine_that_knows_it_not() -> None:
    shared = SharedAllocation(secret=SECRET, half=FLAGS, handle="00")
    assert to_plain(shared).keys() == {"handle", "secret", "half"}


def test_ranks_that_do_not_reach_this_processs_gpu_are_reached_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = str(uuid4())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda _: here)
    assert why_not(replace(_info(), reaches=(UUID, here))) is None
    assert why_not(_info()) is None  # one that does not say
    found = why_not(replace(_info(), reaches=(UUID,)))
    assert found is not None
    assert f"do not reach this process's GPU ({here})" in found
    elsewhere = replace(_info(host="the front's"), hosts=("another", host_id()))
    assert why_not(elsewhere) is None  # of a fleet that has members here
    fleet = replace(_info(), transports=("inline",))
    assert why_not(fleet) == "no rank there maps memory of a GPU of this host"


def test_the_receiver_follows_the_engines_device() -> None:
    shared = SharedAllocation(secret=SECRET, half=FLAGS, handle="00")
    request = UpdateRequest(
        update_id="u", transport="ipc", offer=asdict(shared), bucket_bytes=FLAGS, timeout=1.0
    )
    assert isinstance(
        find("ipc", "cuda:0").receiver(request, EngineRank(0, "cuda:0")), CudaIpcReceiver
    )


def test_flags_on_a_gpu_that_fails_hide_no_error_of_the_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        __hash__ = None  # type: ignore[assignment]

    flags: Any = Failing()
    lent_memory.until_unread(flags, 1.0)
    assert "cannot be seen: CUDA error" in caplog.text


@pytest.mark.parametrize("near", [True, False])
def test_what_every_trainer_rank_holds_is_mapped_before_it_is_sent_or_gathered(
    monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    """Also where the engine is in the first rank's process."""
    monkeypatch.setattr(cuda_ipc, "why_not", lambda info: None)
    offers = ("inline", "p2p", "broadcast", "ipc")
    info = replace(_info(), transports=offers if near else offers[::-1])
    have = tuple({"w": (Box((at, 0), (at + 2, 4)),)} for at in (0, 2))
    found = {}
    for not_mapped in (None, "", "on trainer rank 1, w: it is not contiguous"):
        layout = ShardLayout(None, have, info.tensors, not_mapped=not_mapped)
        found[not_mapped] = ways("auto", info, layout)[0]
    mapped, unknown, apart = found.values()
    assert mapped.transport.name == "ipc"
    assert mapped.reason.endswith("map what each trainer rank holds")
    assert unknown.transport.name == apart.transport.name == "p2p"
    assert "not mapped" not in unknown.reason
    assert apart.reason.endswith("; not mapped: on trainer rank 1, w: it is not contiguous")
