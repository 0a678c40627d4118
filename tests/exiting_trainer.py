"""Trainers that update once and then end, as programs do: by coming to the end of ``main``.

    python exiting_trainer.py DIRECTORY

A process that has imported everything and holds the tiny checkpoint of DIRECTORY. For every JSON
line on stdin, a ``Case``, it forks a trainer of one or two ranks, which end through the whole end
of the interpreter; its answer, a JSON line, says how and after how many seconds.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import rollout.api.embedded
import rollout.server.grpc.server  # noqa: F401
from rollout import RequestAborted, Rollout, SourceFailed, TransferFailed, WeightMismatch
from rollout.testing.faults import Fault, Faulty

TIMEOUT = 30.0
BUCKET = 64 << 10
KEPT: list[Any] = []  # as a script's own globals: alive until the interpreter ends


class Lingering:
    """Makes the end of the interpreter take as long as a larger program's does.

    A thread that comes back from native code meanwhile ends the process by SIGABRT.
    """

    sleep = time.sleep

    def __del__(self) -> None:
        self.sleep(0.3)


def main() -> tuple[dict[str, Any], int, Path] | None:
    """In a trainer: its case, its rank, and where it says when it is done. None at the end."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    KEPT.append(_model(load_file(directory / "model.safetensors")))
    gc.freeze()  # a trainer that goes through all of it at its end would copy every page
    for line in sys.stdin:
        case = json.loads(line)
        marks = [Path(case["scratch"], f"returned-{rank}") for rank in range(case["ranks"])]
        pids = []
        for rank, mark in enumerate(marks):
            pid = os.fork()
            if pid == 0:
                return case, rank, mark
            pids.append(pid)
        print(json.dumps([_end(*one) for one in zip(pids, marks, strict=True)]), flush=True)
    return None


def _model(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with the names of the checkpoint, which is all that an update looks at."""
    whole = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        at = whole
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, nn.Parameter(tensor))
    return whole


def _end(pid: int, mark: Path) -> dict[str, Any]:
    _, status = os.waitpid(pid, 0)
    ended = time.monotonic()
    try:
        seconds = ended - float(mark.read_text())
        mark.unlink()
    except OSError:
        seconds = None
    return {"status": os.waitstatus_to_exitcode(status), "seconds": seconds}


def train(case: dict[str, Any], rank: int) -> None:
    """One update with the outcome that the case asks for."""
    KEPT.append(Lingering())
    sys.stdin = open(os.devnull)  # noqa: SIM115
    log = os.open(case["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    model = copy.deepcopy(KEPT[0])
    if case["ranks"] > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{case['scratch']}/rendezvous", rank=rank,
            world_size=case["ranks"],
        )  # fmt: skip
        if case["outcome"] == "failed":
            model.model.norm.weight = nn.Parameter(torch.ones(65))
        for layer in model.model.layers.children():
            fully_shard(layer)
        fully_shard(model)
    r = _service(case, rank)
    if case["kept"]:
        KEPT.append(r)
    options: dict[str, Any] = {"transport": case["transport"], "bucket_bytes": BUCKET}
    if case["outcome"] == "aborted" and case["ranks"] > 1:
        options["transport"] = Faulty(case["transport"], Fault("cut", bucket=2))
    if case["ranks"] == 1:
        model = dict(_tensors(model, case["outcome"]))
        if case["outcome"] == "aborted":
            model = _breaking(model)
    expected = {
        "committed": None,
        "aborted": SourceFailed if case["ranks"] == 1 else (TransferFailed, RequestAborted),
        "failed": WeightMismatch,
    }[case["outcome"]]
    try:
        receipt = r.update_weights(model, timeout=TIMEOUT, **options)
    except Exception as error:
        if expected is None or not isinstance(error, expected):
            raise
    else:
        assert expected is None, f"{case} went well"
        taken = {"inline": "inline", "grpc_stream": "grpc_stream"}.get(case["transport"])
        assert receipt.transport == (taken or case["transport"]), receipt.transport
    if case["closed"]:
        r.shutdown()
    if case["ranks"] > 1 and case["destroyed"]:
        dist.destroy_process_group()


def _service(case: dict[str, Any], rank: int) -> Rollout:
    """The one at the case's address; for "inline" an engine in the first rank's own process."""
    address = case["address"]
    if case["transport"] == "inline" or case["embedded"]:
        engine = None
        if rank == 0:
            engine = Rollout(
                case["model"], device="cpu", num_threads=1, dtype="float32", max_model_len=64,
                kv_cache_bytes=1 << 20, tensor_parallel_size=case["embedded"] or 1,
            )  # fmt: skip
        if case["ranks"] > 1:
            told = [engine.address if engine is not None else ""]
            dist.broadcast_object_list(told, 0)
            address = told[0]
        if engine is not None:
            return engine
    return Rollout.connect(address)


def _tensors(model: nn.Module, outcome: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        if outcome == "failed" and name == "model.norm.weight":
            tensor = torch.ones(65)
        yield name, tensor


def _breaking(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, item in enumerate(tensors.items()):
        if index == 12:
            raise OSError("the disk went away")
        yield item


if __name__ == "__main__" and (given := main()) is not None:
    train(given[0], given[1])
    given[2].write_text(str(time.monotonic()))
