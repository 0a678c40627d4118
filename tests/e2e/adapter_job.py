"""A rank of an FSDP2 job that sends its adapter, then its base with it; prints the receipts.

python adapter_job.py RANK WORLD PORT ADDRESS CHECKPOINT TRANSPORT...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from adapted_models import adapted
from torch.distributed.fsdp import fully_shard

from rollout import Rollout
from rollout.wire.codec import to_plain

if __name__ == "__main__":
    rank, world, port, address, path, *transports = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    model = adapted(Path(path), 21)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with Rollout.connect(address) as rollout:
        receipts = [
            rollout.update_weights(adapters={"math": model}, transport=transport)
            for transport in transports
        ]
        receipts.append(rollout.update_weights(model, adapters={"math": model}))
    print(json.dumps([to_plain(receipt) for receipt in receipts]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
