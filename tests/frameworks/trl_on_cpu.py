"""What TRL's ``AsyncGRPOTrainer`` asks of a card, in plain torch: importing this is enough."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


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
