"""One rank of an FSDP2 trainer, in whatever torch runs it: updates a service by every transport.

    python other_torch_job.py RANK WORLD STORE MODEL ADDRESS BY=TRANSPORT[+ENCODING] ...

Its weights are those of MODEL times BY, a power of two, so that every torch holds the same bits.
Rank 0 prints a JSON line for each update: what its receipt says, and what is sampled then.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutError, SamplingParams

PROMPT = [5, 6, 7, 8]


def main() -> None:
    rank, world, store, path, address, *updates = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    before = 1.0
    with Rollout.connect(address, timeout=60) as rollout:
        for update in updates:
            by, _, way = update.partition("=")
            transport, _, encoding = way.partition("+")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(float(by) / before)
            before = float(by)
            said = {"torch": torch.__version__, "by": before, "way": way}
            try:
                receipt = rollout.update_weights(
                    model, transport=transport, encoding=encoding or "full", timeout=60
                )
            except RolloutError as error:
                said["error"] = f"{type(error).__name__}: {error}"
            else:
                said |= {
                    "digest": str(receipt.digest),
                    "version": receipt.version,
                    "transport": receipt.transport,
                }
            if rank == "0":
                params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
                said["tokens"] = list(rollout.generate(PROMPT, params)[0].outputs[0].token_ids)
                print(json.dumps(said), flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
