"""TRL's ``AsyncGRPOTrainer`` without a card, in three steps: what its jobs here share."""

from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

ROWS = [{"prompt": [{"role": "user", "content": text}]} for text in ("Hello", "One two")]
SAMPLING = {"num_generations": 4, "max_inflight": 8, "queue_size": 8}  # a worker's
torch.set_num_threads(1)


class Kernel:
    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, **_):
        rows = []
        for segment in range(len(cu_q) - 1):
            here = slice(int(cu_q[segment]), int(cu_q[segment + 1]))
            path = slice(int(cu_k[segment]), int(cu_k[segment + 1]))
            queries, keys = here.stop - here.start, path.stop - path.start
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            one, many, values = (x.transpose(0, 1)[None] for x in (q[here], k[path], v[path]))
            out = scaled_dot_product_attention(
                one, many, values, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            rows.append(out[0].transpose(0, 1))
        return torch.cat(rows)


packing._flash_attn = lambda: Kernel
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks a card for its name


def higher_is_better(completion_ids, **kwargs):
    """No two samples alike: each step has advantages."""
    return [sum(ids) / 1000 for ids in completion_ids]


def make_trainer(model: str, scratch: str, worker: Any, *, config: Any, **settings: Any):
    """``config``: what an ``AsyncGRPOConfig`` has beside what all have here."""
    return AsyncGRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list(ROWS),
        rollout_worker=worker,
        args=AsyncGRPOConfig(
            output_dir=scratch, use_cpu=True, bf16=False, max_steps=3, max_completion_length=6,
            per_device_train_batch_size=8, num_generations=4, gradient_checkpointing=False,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, **config,
        ),
        **settings,
    )  # fmt: skip


def trained(trainer: Any) -> torch.nn.Module:
    return trainer.accelerator.unwrap_model(trainer.model)


def norm(model: torch.nn.Module) -> float:
    return float(sum(p.detach().double().norm() for p in model.parameters()))
