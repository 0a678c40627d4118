"""PPO with a value head on DeepSpeed ZeRO-3; the task, the service and the figures of the demo.

    python trainer_examples/ppo_zero3.py [--steps N] [--output DIR]

Policy and value head are one ZeRO-3 engine of two ranks: no rank holds the whole model. A sample's
reward comes with its last token; generalised advantages spread it over the tokens by the values
that the head gave them. `update_weights(engine.module.policy)` sends the policy and not the head.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from addition_task import PAD
from driver import example
from grpo import (
    Batch,
    Sample,
    clipped_loss,
    largest_difference,
    logprobs_of,
    make_batch,
    scheduled_lr,
)
from torch import Tensor, nn, no_grad, zeros, zeros_like
from torch import distributed as dist
from torch.optim import AdamW
from trainer_rank import Settings, Trainer
from transformers import Qwen3ForCausalLM

from rollout import Rollout, UpdateReceipt

LAMBDA = 0.95  # of generalised advantage estimation; rewards are not discounted
VALUE_LR = 5.0  # times the policy's


class ActorCritic(nn.Module):
    """A policy, and a head that says what reward to expect from each position on."""

    def __init__(self, policy: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.policy = policy
        self.value = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [samples, tokens, vocabulary], and the value [samples, tokens] of each position
        before its token was sampled."""
        hidden = self.policy.model(ids).last_hidden_state
        values = self.value(hidden).squeeze(-1)
        before = values.roll(1, 1)
        return self.policy.lm_head(hidden), before


class PPOTrainer(Trainer):
    def __init__(self, settings: Settings) -> None:
        import deepspeed

        # Its shared-memory collective would be compiled first; gloo does the same.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ["LOCAL_RANK"] = str(settings.rank)  # DeepSpeed insists
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        self.settings = settings
        model = ActorCritic(self.start())
        groups = [
            {"params": list(model.policy.parameters()), "lr": settings.lr, "scale": 1.0},
            {"params": list(model.value.parameters()), "lr": settings.lr, "scale": VALUE_LR},
        ]
        config = {
            "train_micro_batch_size_per_gpu": settings.prompts * settings.samples,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        optimizer = AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.model = self.engine
        self.rollout = Rollout.connect(settings.address)

    def push(self) -> UpdateReceipt:
        return self.rollout.update_weights(self.engine.module.policy)

    def learn(self, samples: list[Sample], number: int) -> float:
        s = self.settings
        whole = make_batch(samples, s.samples, PAD)
        with no_grad():
            logits, values = self.engine(whole.ids)
        largest = largest_difference(whole, logprobs_of(logits, whole.ids))
        gains = advantages(whole, values, [sample.reward for sample in samples])
        returns = (gains + values).masked_fill(~whole.mask, 0.0)
        whole = replace(whole, advantages=normalised(gains, whole.mask))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["scale"] * scheduled_lr(s.lr, number, s.steps)
        size = len(samples) // s.minibatches
        for first in range(0, len(samples), size):
            part = slice(first, first + size)
            self.teach(
                Batch(
                    whole.ids[part], whole.mask[part], whole.logprobs[part], whole.advantages[part]
                ),
                returns[part],
            )
        return largest

    def teach(self, batch: Batch, returns: Tensor) -> None:
        logits, values = self.engine(batch.ids)
        loss = clipped_loss(batch, logprobs_of(logits, batch.ids), self.settings.clip)
        misses = ((values - returns) ** 2)[batch.mask].mean()
        self.engine.backward(loss + 0.5 * misses)
        self.engine.step()

    def whole(self) -> Qwen3ForCausalLM | None:
        from deepspeed.runtime.zero import GatheredParameters

        policy = self.engine.module.policy
        model = self.start() if self.settings.rank == 0 else None
        for name, parameter in policy.named_parameters():
            with GatheredParameters([parameter]):
                if model is not None:
                    model.get_parameter(name).data.copy_(parameter.data)
        return model


def advantages(batch: Batch, values: Tensor, rewards: list[float]) -> Tensor:
    """Generalised advantages [samples, tokens] of the sampled tokens, 0 elsewhere.

    https://arxiv.org/abs/1506.02438, equation 16, with gamma 1 and the reward at the last token.
    """
    found, running, after = zeros_like(values), zeros(len(values)), zeros(len(values))
    gains = zeros(len(values)).new_tensor(rewards)
    for token in reversed(range(values.shape[1])):
        here = batch.mask[:, token]
        missed = gains + after - values[:, token]
        running = (missed + LAMBDA * running).where(here, running)
        found[:, token] = running.where(here, zeros_like(running))
        after = values[:, token].where(here, after)
        gains = gains.where(~here, zeros_like(gains))  # it came with the last token
    return found


def normalised(gains: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over the tokens of all ranks; collective."""
    inside = gains[mask].double()
    sums = inside.new_tensor([len(inside), inside.sum(), (inside**2).sum()])
    dist.all_reduce(sums)
    mean = sums[1] / sums[0]
    deviation = (sums[2] / sums[0] - mean**2).clamp(min=0).sqrt()
    return ((gains - mean) / (deviation + 1e-4)).float()


if __name__ == "__main__":
    settings = {"prompts": 384, "samples": 1, "output": Path("demo_output/ppo_zero3")}
    settings["fewest_samples"] = 1  # its advantages are of each token's value, not of a group
    sys.exit(example(__file__, __doc__ or "", PPOTrainer, **settings))
