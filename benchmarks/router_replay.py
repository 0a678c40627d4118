"""Trainer minus rollout of a mixture's sampled tokens, with and without router replay.

    python benchmarks/router_replay.py [--tokens 4096] [--rollout bfloat16] [--trainer bfloat16]
        [--experts 32] [--layers 8]

The model is a random Qwen3-MoE (hidden 256, 32 experts, 4 of them for a token, 8 layers; linears of
gain 1), its weights numbers of bfloat16. The engine samples with ``return_routed_experts``;
transformers' module (SDPA attention) scores the same tokens without a KV cache, first as its own
routers choose, then within ``replayed_experts``. Last the engine scores them with the trainer's own
experts (``routed_experts=``): what is left is not the routers'.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout import RequestOutput, Rollout, SamplingParams
from rollout.integrations.router_replay import expert_batch, replayed_experts

PROMPT, NEW, AT_ONCE = 16, 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rollout", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--trainer", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--num-threads", type=int, default=2)
    measure(parser.parse_args())


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=256, num_hidden_layers=args.layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, num_experts=args.experts, num_experts_per_tok=4,
        moe_intermediate_size=128, norm_topk_prob=True, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                wide = 0.15 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, wide)
    return model.to(torch.bfloat16)


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.num_threads)
    model = make_model(args)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 8192, (-(-args.tokens // NEW), PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        model = Qwen3MoeForCausalLM.from_pretrained(  # rope's tables stay float32
            directory, dtype=getattr(torch, args.trainer), attn_implementation="sdpa"
        ).eval()
        with Rollout(
            directory, dtype=args.rollout, skip_tokenizer_init=True, kv_cache_bytes=1 << 28,
            num_threads=args.num_threads,
        ) as engine:  # fmt: skip
            params = SamplingParams(max_tokens=NEW, seed=7, return_routed_experts=True)
            outputs = engine.generate(prompts, params)
            rollout = np.array([o.outputs[0].logprobs.raw for o in outputs])
            whole = torch.tensor([o.prompt_token_ids + o.outputs[0].token_ids for o in outputs])
            experts = expert_batch([o.outputs[0].routed_experts for o in outputs], PROMPT + NEW)
            plain, own = score(model, whole, None)
            replayed, _ = score(model, whole, experts)
            told = engine.generate(whole.tolist(), [scoring(rows) for rows in own])
    sampled = f"{rollout.size} tokens, rollout {args.rollout}, trainer {args.trainer}"
    print(f"{sampled}, {args.layers} layers of {args.experts} experts, 4 of a token")
    flips(own.numpy()[:, :-1], experts.numpy()[:, :-1])
    show("trainer - rollout, each with its own experts", plain - rollout)
    show("trainer - rollout, the rollout's experts in both", replayed - rollout)
    show("trainer - rollout, the trainer's experts in both", plain - prompt_scores(told))


def scoring(rows: Tensor) -> SamplingParams:
    return SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, routed_experts=rows.numpy()
    )


def prompt_scores(outputs: Sequence[RequestOutput]) -> NDArray[np.float64]:
    rows = [zip(o.prompt_logprobs or [], o.prompt_token_ids, strict=True) for o in outputs]
    return np.array([[row[t] for row, t in list(pairs)[PROMPT:] if row] for pairs in rows])


def score(
    model: PreTrainedModel, whole: Tensor, experts: Tensor | None
) -> tuple[NDArray[np.float64], Tensor]:
    """Logprobs [sequences, NEW] of what was sampled, and the routers' choices [sequences, tokens,
    layers, experts of a token]."""
    values, chosen = [], []
    seen: list[Tensor] = []

    def see(module: Any, given: Any, out: Any) -> None:
        seen.append(out[2])

    hooks = [m.register_forward_hook(see) for n, m in model.named_modules() if n.endswith(".gate")]
    for start in range(0, len(whole), AT_ONCE):
        ids = whole[start : start + AT_ONCE]
        told = torch.full((*ids.shape, len(hooks), 4), -1)  # as the routers choose
        if experts is not None:
            told = experts[start : start + AT_ONCE]
        seen.clear()
        with replayed_experts(model, told):
            logits = model(ids).logits[:, PROMPT - 1 : -1].float()
        chosen.append(torch.stack(seen, 1).view(*ids.shape, len(hooks), 4))
        picked = logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]
        values.append(picked.double())
    for hook in hooks:
        hook.remove()
    return torch.cat(values).numpy(), torch.cat(chosen)


def flips(own: NDArray[Any], told: NDArray[Any]) -> None:
    differs = (np.sort(own) != np.sort(told)).any(-1)
    print(
        f"other experts in {differs.mean():.2%} of a token's layers, and in some layer of "
        f"{differs.any(-1).mean():.1%} of the tokens"
    )


def show(what: str, differences: NDArray[np.float64]) -> None:
    size = np.abs(differences)
    print(
        f"{what}: mean {differences.mean():+.1e}, |.| mean {size.mean():.1e}, "
        f"p99 {np.quantile(size, 0.99):.1e}, max {size.max():.1e}, "
        f"KL (k3) {(np.expm1(differences) - differences).mean():.1e}"
    )


if __name__ == "__main__":
    main()
