"""A fleet whose members map the memory of one trainer's GPU; skipped where there is no card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card_engines import card_engine
from shared_engines import eventually

from rollout import Rollout
from rollout.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "fleet"))

from fleet_front import Front

HERE = Path(__file__).parent
WAIT = 120.0  # seconds: for hangs
CARD = "the trainer's GPU"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    # What is late in the interpreter, beside other tests, is no member that hangs.
    pytest.mark.timeout(600),
]
# A file tells the process what befalls it: it cannot map the memory, or, as it reads, it finds what
# was overwritten since, or is killed.
MEMBER = """
import os, signal, sys
from pathlib import Path
from card_engines import card_engine
from rollout.errors import TransferFailed
from rollout.weight_sync.transports.cuda_ipc import CudaIpcReceiver
checkpoint, fate = map(Path, sys.argv[1:])
regions, connect = CudaIpcReceiver.regions, CudaIpcReceiver.connect
def maps(self, timeout):
    if fate.read_text() == "refused":
        raise TransferFailed("cudaIpcOpenMemHandle failed: invalid argument (1)")
    connect(self, timeout)
def reads(self, header, carried):
    found, told = regions(self, header, carried), fate.read_text()
    if told == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return [x * 0 for x in found] if told == "overwritten" else found
CudaIpcReceiver.regions, CudaIpcReceiver.connect = reads, maps
with card_engine(checkpoint, dtype="bfloat16", cuda_graphs="off") as engine:
    print(engine.address, flush=True)
    sys.stdin.read()
"""
# Told what to do by lines, it says what came of each. A second one, which waits until it is to
# update and be killed, is forked before there is anything of CUDA's or gRPC's.
TRAINER = """
import json, os, signal, sys, time
from safetensors.torch import load_file
from rollout import Rollout
from rollout.rpc.update_channel import GrpcWeightChannel
from rollout.weight_sync.transports.cuda_ipc import CudaIpcSender
begin, dying = os.pipe()
if not (child := os.fork()):
    os.close(dying)
    if not os.read(begin, 1):
        os._exit(0)
held = {name: x.cuda() for name, x in load_file(sys.argv[2] + "/model.safetensors").items()}
sent, announce, bucket = [0], CudaIpcSender.in_place, GrpcWeightChannel.bucket
def counted(self, header, payload):
    sent[0] += 0 if payload is None else payload.nbytes
    bucket(self, header, payload)
def dies(self, channel, header, regions):
    announce(self, channel, header, regions)
    os.kill(os.getpid(), signal.SIGKILL)
GrpcWeightChannel.bucket = counted
engine = Rollout.connect(sys.argv[1])
if not child:
    CudaIpcSender.in_place = dies
    engine.update_weights(held, transport="ipc", timeout=120)
print("up", flush=True)
for line in sys.stdin:
    told, sent[0] = json.loads(line), 0
    if told.get("dies"):
        os.write(dying, b"!")
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    for value in held.values():
        value.mul_(told["times"])
    if "only" in told:
        value[..., :1] += told["only"]
    got = engine.update_weights(held, encoding=told["encoding"], timeout=120)
    said = {k: v for k, v in got.details.items() if isinstance(v, str | dict)}
    print(json.dumps({"transport": got.transport, "sent": sent[0], "bytes": got.wire_bytes,
                      "tensors": got.num_tensors, **said}), flush=True)
"""

# One of two ranks, each of which has a half of every tensor; at each line they update together.
HALF = """
import json, sys, torch, torch.distributed as dist
from safetensors.torch import load_file
from rollout import Rollout
from rollout.weight_sync.agreement import Agreement
from rollout.weights import Box, TensorMeta
address, path, meet, rank = sys.argv[1:]
rank = int(rank)
dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=2)
first = load_file(path + "/model.safetensors")
halves = {}
for name, x in first.items():
    of = len(x) // 2
    box = Box((rank * of,) + (0,) * (x.dim() - 1), ((rank + 1) * of,) + tuple(x.shape[1:]))
    halves[name] = [(box, x[box.slices].cuda())]
class Halves:
    def __init__(self):
        self.agreement = Agreement.over((0, 1), 60.0)
    def metadata(self):
        return tuple(TensorMeta(name, x.dtype, tuple(x.shape)) for name, x in first.items())
    def local_boxes(self):
        return [(name, [box for box, _ in found]) for name, found in halves.items()]
    def local_values(self, name):
        return halves[name]
    held_values = local_values
    def __iter__(self):
        for name, x in first.items():
            yield name, x if rank == 0 else x.to("meta")
with Rollout.connect(address) as engine:
    print("up", flush=True)
    for line in sys.stdin:
        for name, [(_, half)] in halves.items():
            half.mul_(1.25)
            first[name].mul_(1.25)
        got = engine.update_weights(Halves(), transport="ipc", timeout=120)
        told = ("members", "members_map", "read_in_place", "sent_bytes")
        print(json.dumps({key: got.details.get(key) for key in told}), flush=True)
"""


@contextmanager
def _running(code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    paths = [*map(str, (HERE, HERE.parent)), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


class _Trainer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._said() == "up"

    def update(self, encoding: str = "full", times: float = 1.25, **told: Any) -> Any:
        told |= {"encoding": encoding, "times": times}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return json.loads(self._said())

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class _Fleet:
    """Two members, in a process of its own and in this one, and who trains them in a third."""

    def __init__(self, here: Rollout, there: str, fate: Path, record: Path) -> None:
        self.here, self.fate = here, fate
        members = [here, SimpleNamespace(address=there)]
        self.front = Front(record, members, lease=5.0, quorum=1)
        self.front.fleet.wait_serving(2, WAIT)

    def befalls(self, what: str) -> None:
        self.fate.write_text(what)

    def serves(self, version: int) -> bool:
        """Whether both members do, the same weights, as the front tells of."""
        self.front.fleet.wait_serving(2, WAIT)
        links = self.front.fleet.links()
        digests = [link.client.digests(WAIT) for link in links]
        versions = {link.client.info().version for link in links}
        assert digests[0] == digests[1]
        return versions == {version} == {self.front.rollout.weight_version}


@pytest.fixture(scope="module")
def fleet(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "fate").write_text("")
    with (
        _running(MEMBER, tiny_qwen3, folder / "fate") as process,
        card_engine(tiny_qwen3, dtype="bfloat16", cuda_graphs="off") as here,
    ):
        assert process.stdout is not None
        made = _Fleet(here, process.stdout.readline().strip(), folder / "fate", folder / "record")
        try:
            yield made
        finally:
            made.front.close()


@pytest.fixture(scope="module")
def trainer(fleet: _Fleet, tiny_qwen3: Path) -> Iterator[_Trainer]:
    with _running(TRAINER, fleet.front.rollout.address, tiny_qwen3) as process:
        yield _Trainer(process)


def test_every_member_reads_the_trainers_tensors_where_they_lie(
    fleet: _Fleet, trainer: _Trainer
) -> None:
    """float32 ones, cast on the way; changes lie in the trainer's buckets."""
    everybody = dict.fromkeys(fleet.front.names, CARD)
    # The first of the deltas has nothing to build on.
    for version, (asked, encoding) in enumerate((("full",) * 2, ("delta", "full"), ("delta",) * 2)):
        got = trainer.update(encoding=asked, times=1 if encoding == "delta" else 1.25, only=0.5)
        assert got["transport"] == "ipc"
        assert "its GPUs' memory can be mapped" in got["transport_reason"]
        assert got["encoding"] == encoding
        assert got["sent"] == 0 < got["bytes"]  # on the trainer's uplink: handles alone
        assert got["members"] == dict.fromkeys(fleet.front.names, "committed")
        assert got["members_map"] == everybody
        assert got["front_sent_bytes"] == dict.fromkeys(fleet.front.names, 0)
        if asked == "full":
            assert got["read_in_place"] == f"{got['tensors']} tensors"
            assert "packed_because" not in got
        assert fleet.serves(version + 1)


def test_a_member_that_maps_nothing_is_sent_bytes_beside_those_that_do(
    fleet: _Fleet, trainer: _Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another host, or one whose driver refuses: that costs one update, which says why. The
    front may be elsewhere, too.
    """
    for module in ("fronts.backend", "updates.channel"):
        monkeypatch.setattr(f"rollout.fleet.{module}.host_id", lambda: "the front's")
    near, far = fleet.front.fleet.links()
    fleet.befalls("refused")
    got = trainer.update()
    assert got["members"][near.name] == "committed"
    assert "cudaIpcOpenMemHandle failed" in got["members"][far.name]
    assert fleet.serves(4)
    got = trainer.update()
    assert got["transport"] == "ipc"
    assert got["members"] == dict.fromkeys(fleet.front.names, "committed")
    assert got["members_map"] == {near.name: CARD}
    assert got["members_fed_by"] == {far.name: "the front"}
    assert got["front_sent_bytes"] == {near.name: 0, far.name: got["bytes"]}
    assert got["sent"] == got["bytes"]  # each byte once
    assert got["packed_because"].endswith(f"do not map this GPU: {far.name}")
    assert fleet.serves(5)
    fleet.befalls("")
    far._maps_no_card = None
    far.announced(far.control.info())


def test_who_reads_what_was_overwritten_votes_against_it_and_the_others_commit(
    fleet: _Fleet, trainer: _Trainer
) -> None:
    fleet.befalls("overwritten")
    here, there = fleet.front.names
    got = trainer.update()
    assert got["members"][here] == "committed"
    assert got["members"][there].startswith("fenced: ")
    assert "tensors arrived changed" in got["members"][there]
    fleet.befalls("")
    assert fleet.serves(6)  # another has brought it up to date


def test_a_trainer_that_is_killed_while_members_read_costs_the_update_alone(
    fleet: _Fleet, trainer: _Trainer
) -> None:
    before = fleet.front.rollout.weight_version
    assert trainer.update(dies=True) == signal.SIGKILL
    links = fleet.front.fleet.links()
    eventually(lambda: all(link.client.info().state == "idle" for link in links), WAIT)
    assert fleet.serves(before)


def test_every_member_maps_what_each_of_several_trainer_ranks_holds(
    fleet: _Fleet, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Where one cannot, all is gathered to the first rank, in whose buckets it comes."""
    address, meet = fleet.front.rollout.address, tmp_path / "meet"
    words = [(address, tiny_qwen3, meet, rank) for rank in (0, 1)]
    near, far = fleet.front.fleet.links()
    version = fleet.front.rollout.weight_version
    with _running(HALF, *words[0]) as first, _running(HALF, *words[1]) as second:
        ranks = [first, second]

        def said() -> list[str]:
            return [rank.stdout.readline().strip() for rank in ranks]  # type: ignore[union-attr]

        def update() -> Any:
            for rank in ranks:
                print(file=rank.stdin, flush=True)
            one, other = said()
            assert one == other
            return json.loads(one)

        assert said() == ["up", "up"]
        for turn in (1, 2, 3):
            got = update()
            assert got["members"] == dict.fromkeys(fleet.front.names, "committed")
            assert got["members_map"] == dict.fromkeys(fleet.front.names, CARD)
            boxes, _, of, tensors, _ = got["read_in_place"].split()
            assert (of, int(boxes)) == ("of", 2 * int(tensors))
            one, other = got["sent_bytes"].split(",")
            assert one == other != "0"
            assert fleet.serves(version + turn)
        fleet.befalls("refused")
        assert "cudaIpcOpenMemHandle failed" in update()["members"][far.name]
        fleet.befalls("")
        assert fleet.serves(version + 4)
        got = update()
        assert got["members"] == dict.fromkeys(fleet.front.names, "committed")
        assert got["members_map"] == {near.name: CARD}
        assert got["read_in_place"] is None
        assert fleet.serves(version + 5)
    far._maps_no_card = None
    far.announced(far.control.info())


def test_where_no_member_maps_it_auto_sends_bytes_and_ipc_says_what_to_do(
    fleet: _Fleet, trainer: _Trainer
) -> None:
    """As of members that see other GPUs alone, of CPUs, or of another host."""
    links = fleet.front.fleet.links()
    announced = [link.control.info() for link in links]

    def announce(**what: Any) -> None:
        for link, info in zip(links, announced, strict=True):
            link.announced(replace(info, **what))

    held = {"model.norm.weight": torch.ones(64).cuda()}
    with Rollout.connect(fleet.front.rollout.address) as engine:
        for what, why in (
            ({"reaches": ("another",)}, "do not reach this process's GPU"),
            ({"reaches": ()}, "no rank there maps memory of a GPU of this host"),
            ({"host": "another-host"}, "no member of the fleet maps memory of the GPU"),
        ):
            announce(**what)
            with pytest.raises(ConfigError, match=f"{why}.*; use transport='auto'"):
                engine.update_weights(held, partial=True, transport="ipc")
    got = trainer.update()
    assert got["transport"] == "grpc_stream"
    assert "ipc failed: no member of the fleet maps" in got["transport_reason"]
    assert got["members"] == dict.fromkeys(fleet.front.names, "committed")
    announce()


def test_a_member_that_is_killed_while_it_reads_costs_none_of_the_others(
    fleet: _Fleet, trainer: _Trainer
) -> None:
    fleet.befalls("killed")
    here, there = fleet.front.names
    before = fleet.front.rollout.weight_version
    got = trainer.update(times=0.5)
    assert got["members"][here] == "committed"
    assert got["members"][there].startswith("fenced: ")
    assert got["members_map"] == {here: CARD}
    assert fleet.here.weight_info().version == before + 1
    assert trainer.update()["members"][here] == "committed"  # the next is none the worse for it
