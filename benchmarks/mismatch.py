"""Trainer minus rollout: logprobs of sampled tokens under a transformers module and this engine.

    python benchmarks/mismatch.py [--dtypes float32,bfloat16] [--tokens 10000] [--init peaked|small]
        [--picture FILE.png]

The trainer is a plain transformers module in this process, with SDPA attention; it sends its
weights by ``update_weights``, and ``check_weights`` judges them. The model is the ``tiny`` shape of
``make_checkpoint.py`` (10 M random parameters): ``small`` is transformers' own initialisation,
``peaked`` has linears of gain 1, so rounding grows with depth. Each side's distance from a float64
module of the same weights is given too: how much of the difference is the dtype's own.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from make_checkpoint import tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout import Rollout, SamplingParams

PROMPT, NEW, SEQUENCES_AT_ONCE = 16, 128, 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tokens", type=int, default=10000)
    parser.add_argument("--init", choices=("peaked", "small"), default="small")
    parser.add_argument("--picture")
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    found = {
        name: measure(getattr(torch, name), args.tokens, args.num_threads, args.init)
        for name in args.dtypes.split(",")
    }
    if args.picture:
        draw(found, args.picture)


def trainer(dtype: torch.dtype, init: str) -> PreTrainedModel:
    """A model whose weights are those of ``dtype``, computing in it."""
    torch.manual_seed(0)
    config = tiny()
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and init == "peaked":
                wide = 0.15 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, wide)
    model = model.to(dtype)
    model.config.dtype = dtype
    return model


@torch.no_grad()
def measure(dtype: torch.dtype, tokens: int, threads: int, init: str) -> Tensor:
    """Trainer minus rollout of each sampled token, float64; prints the figures."""
    model = trainer(dtype, init)
    count = -(-tokens // NEW)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 8192, (count, PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(model.config).to(dtype).save_pretrained(directory)
        with Rollout(
            directory,
            dtype=str(dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            kv_cache_bytes=1 << 28,
            num_threads=threads,
        ) as engine:
            receipt = engine.update_weights(model)
            outputs = engine.generate(prompts, SamplingParams(max_tokens=NEW, seed=7))
            report = engine.check_weights(model)
    samples = [out.outputs[0] for out in outputs]
    whole = torch.tensor([p + s.token_ids for p, s in zip(prompts, samples, strict=True)])
    rollout = torch.tensor([s.logprobs.raw for s in samples], dtype=torch.float64)
    trained = score(model, whole)
    print(f"{dtype}: {rollout.numel()} tokens, mean logprob {rollout.mean():.3f}; weights of")
    print(f"  version {receipt.version}: equal={report.equal}, {report.num_tensors} tensors")
    show("trainer - rollout", trained - rollout)
    exact = score(model.double(), whole)
    show("trainer - float64 module", trained - exact)
    show("rollout - float64 module", rollout - exact)
    return (trained - rollout).flatten()


def score(model: PreTrainedModel, whole: Tensor) -> Tensor:
    """Raw logprobs of the tokens after the prompt, float64 [sequences, NEW]."""
    found = []
    for rows in torch.split(whole, SEQUENCES_AT_ONCE):
        logits = model(rows[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        logprobs = logits.double().log_softmax(-1)
        found.append(logprobs.gather(2, rows[:, PROMPT:, None])[..., 0])
    return torch.cat(found)


def show(what: str, difference: Tensor) -> None:
    """|d| by mean, p99 and max; KL(rollout || trainer) by the low-variance estimate e^d - 1 - d."""
    size = difference.abs().flatten()
    kl = (difference.expm1() - difference).mean()
    print(
        f"  {what}: mean |d| {size.mean():.2e}, p99 {size.quantile(0.99):.2e}, "
        f"max {size.max():.2e}, mean d {difference.mean():+.1e}, KL {kl:.2e}",
        flush=True,
    )


def draw(found: dict[str, Tensor], path: str) -> None:
    """One histogram for each dtype, counts on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    for axis, (name, values) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        axis.hist(values.numpy(), bins=81, log=True)
        axis.set(title=name, xlabel="trainer - rollout logprob", ylabel="tokens")
        axis.ticklabel_format(axis="x", scilimits=(-2, 2))
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
