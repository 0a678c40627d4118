"""The demo with LoRA: adapters (PEFT) alone are trained, and the service gets merged weights.

    python trainer_examples/grpo_lora.py [--steps N] [--output DIR]

`update_weights(peft_model, partial=True)` merges one layer after the other on its way out: base
weights stay as they are, and what no adapter changes is not sent again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from driver import example
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_rank import Trainer
from transformers import Qwen3ForCausalLM

from rollout import UpdateReceipt

LORA = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear")


class LoraTrainer(Trainer):
    def shard(self, model: Qwen3ForCausalLM) -> nn.Module:
        mesh = init_device_mesh("cpu", (self.settings.ranks,))
        adapted: PeftModel = get_peft_model(model, LORA)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(adapted, mesh=mesh)

    def push(self) -> UpdateReceipt:
        return self.rollout.update_weights(self.model, partial=True)

    def whole(self) -> Qwen3ForCausalLM | None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.settings.rank != 0:
            return None
        adapted = get_peft_model(self.start(), LORA)
        adapted.load_state_dict(state)
        merged: Qwen3ForCausalLM = adapted.merge_and_unload()
        return merged


if __name__ == "__main__":
    if "--deterministic" in sys.argv:
        sys.exit("--deterministic: the engine merges adapters, this trainer does not; leave it out")
    sys.exit(
        example(
            __file__,
            __doc__ or "",
            LoraTrainer,
            lr=2e-3,
            steps=150,
            output=Path("demo_output/lora"),
        )
    )
