"""Deltas from a sharded trainer: each rank compares its shard, the first or each of them sends."""

from __future__ import annotations

import json

import pytest
import torch
from forked import Script
from serving import serve
from tiny_models import write_tiny

RANK = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from rollout import Rollout

path, address, rendezvous, rank, *transports = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
rows = []
with Rollout.connect(address, timeout=20) as rollout:
    for transport in transports:
        for encoding in ("full", "delta", "delta"):
            with torch.no_grad():
                for parameter in model.parameters():
                    shard = parameter.to_local().view(-1)
                    shard[3::100] += 0.25
            receipt = rollout.update_weights(model, transport=transport, encoding=encoding)
            equal = rollout.check_weights(model).equal
            rows.append([receipt.transport, receipt.details["encoding"], receipt.version,
                         receipt.wire_bytes, receipt.digest, equal])
print(json.dumps(rows), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    where = tmp_path_factory.mktemp("service")
    write_tiny(where, seed=3)
    return where


def test_two_ranks_of_fsdp2_send_what_changed(directory, tmp_path) -> None:
    flags = ("--tensor-parallel-size", "2", "--num-kv-blocks", "64", "--max-model-len", "128")
    with serve(directory, *flags) as served:
        given, transports = (str(directory), served.grpc), ("ipc", "broadcast", "grpc_stream")
        script = tmp_path / "rank.py"
        script.write_text(RANK)
        ranks = [
            Script(
                script, [*given, str(tmp_path / "meet"), str(rank), *transports],
                tmp_path / f"{rank}.log",
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            codes = [process.wait(270) for process in ranks]
            said = [process.stdout.read() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
                process.close()
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert codes == [0, 0], logs
    rows, others = (json.loads(out.splitlines()[-1]) for out in said)
    assert rows == others  # the same receipts on every rank
    assert [row[:3] for row in rows] == [
        ["ipc", "full", 1], ["ipc", "full", 2], ["ipc", "delta", 3],
        ["broadcast", "full", 4], ["broadcast", "full", 5], ["broadcast", "delta", 6],
        ["grpc_stream", "full", 7], ["grpc_stream", "full", 8], ["grpc_stream", "delta", 9],
    ]  # fmt: skip
    for whole, changes in ((rows[1], rows[2]), (rows[4], rows[5]), (rows[7], rows[8])):
        assert changes[3] <= 0.04 * whole[3]
    assert all(row[5] for row in rows)
    assert torch.tensor([row[4] for row in rows], dtype=torch.float64).unique().numel() == 9
