"""One rank of an FSDP2 trainer whose shards an engine in the first one's process maps.

    python mapped_job.py RANK WORLD FOLDER [apart]

``apart``: they cannot be mapped where they lie, and the ranks bring each other what an engine's
rank maps. Files stand for memory of a GPU. The first rank prints, of each case, how the update
went and what differs on the engine from what the ranks hold together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu" / "pretended"))

from pretended_cuda.on_cpu import exchanging, replacements
from pretended_cuda.segments import in_segment

for owner, name, value in replacements():
    setattr(owner, name, value)

from rollout import Rollout  # noqa: E402 - sees what has been replaced

RANK, WORLD, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
APART = sys.argv[4:] == ["apart"]
for owner, name, value in exchanging(lambda: RANK) if APART else ():
    setattr(owner, name, value)
SETTINGS: dict[str, Any] = {
    "device": "cpu", "weight_layout": "plain", "num_threads": 1, "skip_tokenizer_init": True,
    "max_model_len": 64, "kv_cache_bytes": 1 << 22, "max_num_seqs": 4,
}  # fmt: skip


def sharded(arch: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A model over the ranks, whose shards can be mapped, and all of its values."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER / arch)).to(dtype)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    for parameter in () if APART else model.parameters():
        parameter._local_tensor.data = in_segment(parameter._local_tensor.data)
    return model, whole


def change(model: nn.Module, whole: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.mul_(0.5)
        for tensor in {tensor.data_ptr(): tensor for tensor in whole.values()}.values():
            tensor.mul_(0.5)


CASES = (  # architecture, the trainer's dtype, the engine's
    ("qwen3", torch.bfloat16, "bfloat16"),
    ("qwen3", torch.float32, "bfloat16"),
    ("qwen3_moe", torch.float32, "float32"),  # whose experts are one tensor there
)


def main() -> None:
    torch.set_num_threads(1)
    meet = f"file://{FOLDER / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=RANK, world_size=WORLD)
    for arch, dtype, engine_dtype in CASES:
        model, whole = sharded(arch, dtype)
        address: list[Any] = [None]
        engine = None
        if RANK == 0:
            engine = Rollout(str(FOLDER / arch), dtype=engine_dtype, **SETTINGS)
            address[0] = engine.serve()
        dist.broadcast_object_list(address)
        with Rollout.connect(address[0]) as link:
            for turn in range(3):
                receipt = link.update_weights(model)
                if turn < 2:
                    change(model, whole)
        if engine is not None:
            with engine:
                differing = engine.check_weights(whole).differing
            told = [receipt.transport, receipt.details.get("read_in_place"), list(differing)]
            print(json.dumps([arch, *told]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


main()
