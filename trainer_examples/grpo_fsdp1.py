"""The demo with FSDP1: `FullyShardedDataParallel` ranks and a tensor-parallel rollout service.

    python trainer_examples/grpo_fsdp1.py [--steps N] [--output DIR]

What differs from grpo_fsdp2.py is how a model is wrapped and its gradients are clipped; the push
of the weights is the same one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from driver import example
from torch import device, nn, no_grad
from torch.distributed.fsdp import FullyShardedDataParallel
from trainer_rank import Trainer
from transformers import Qwen3ForCausalLM


class FSDP1Trainer(Trainer):
    def shard(self, model: Qwen3ForCausalLM) -> nn.Module:
        settings = {"device_id": device("cpu"), "use_orig_params": True}
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = FullyShardedDataParallel(layer, **settings)
        return FullyShardedDataParallel(model, **settings)

    def whole(self) -> Qwen3ForCausalLM | None:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            state = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        if self.settings.rank != 0:
            return None
        model = self.start()
        with no_grad():
            for name, value in state.items():
                model.get_parameter(name).copy_(value)
        return model

    def clip_gradients(self) -> None:
        assert isinstance(self.model, FullyShardedDataParallel)
        self.model.clip_grad_norm_(1.0)


if __name__ == "__main__":
    sys.exit(example(__file__, __doc__ or "", FSDP1Trainer, output=Path("demo_output/fsdp1")))
