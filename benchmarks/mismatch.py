"""Trainer minus rollout: logprobs of sampled tokens under an FSDP2 trainer and under this engine.

    python benchmarks/mismatch.py [--dtypes float32,bfloat16] [--tokens 10000] [--init small|peaked]
        [--head-dtype auto|float32] [--kv-cache-dtype int8] [--deterministic] [--picture FILE.png]

The trainer is a transformers module with SDPA attention under FSDP2 on two gloo ranks, processes of
their own: float32 parameters, and for bfloat16 FSDP's mixed precision, as trainers have it. It
sends its weights by ``update_weights``; the engine samples; the ranks score what was sampled, half
each, without a KV cache; ``check_weights`` says whether the weights were equal. The model is the
``tiny`` shape of ``make_checkpoint.py`` (10 M random parameters): ``small`` is transformers' own
initialisation, ``peaked`` has linears of gain 1, so rounding grows with depth. Each side's
distance from a float64 module of the same weights is given too: how much is the dtype's own.
``--head-dtype float32`` makes the logits of both sides in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from make_checkpoint import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainer_group import TRAINERS, trainer_group
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout import Rollout, SamplingParams

PROMPT, NEW, SEQUENCES_AT_ONCE = 16, 128, 8
WAIT = 600.0  # seconds for the ranks to meet, to update and to score


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tokens", type=int, default=10000)
    parser.add_argument("--init", choices=("peaked", "small"), default="small")
    parser.add_argument("--head-dtype", choices=("auto", "float32"), default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the engine")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--picture")
    parser.add_argument("--num-threads", type=int, default=2, help="of the engine")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_trainer(args)
        return
    torch.set_num_threads(args.num_threads)
    found = {name: measure(name, args) for name in args.dtypes.split(",")}
    if args.picture:
        draw(found, args.picture)


def make_model(dtype: torch.dtype, init: str) -> PreTrainedModel:
    """A float32 module whose weights are numbers of ``dtype``; the same in every process."""
    torch.manual_seed(0)
    config = tiny()
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and init == "peaked":
                wide = 0.15 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, wide)
            parameter.copy_(parameter.to(dtype))
    return model


# ---- the parent: the engine, and the figures ----


@torch.no_grad()
def measure(name: str, args: argparse.Namespace) -> Tensor:
    """Trainer minus rollout of each sampled token, float64; prints the figures."""
    dtype = getattr(torch, name)
    count = -(-args.tokens // (NEW * TRAINERS)) * TRAINERS
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 8192, (count, PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        other = AutoModelForCausalLM.from_config(make_model(dtype, args.init).config)
        other.to(dtype).save_pretrained(folder / "other")  # what the update replaces
        with (
            Rollout(
                str(folder / "other"),
                dtype=name,
                head_dtype=args.head_dtype,
                kv_cache_dtype=args.kv_cache_dtype,
                deterministic=args.deterministic,
                skip_tokenizer_init=True,
                kv_cache_bytes=1 << 28,
                num_threads=args.num_threads,
            ) as engine,
            trainers(args, name, engine.address, folder) as ranks,
        ):
            sent = ranks.answer()
            outputs = engine.generate(prompts, SamplingParams(max_tokens=NEW, seed=7))
            samples = [out.outputs[0] for out in outputs]
            whole = torch.tensor([p + s.token_ids for p, s in zip(prompts, samples, strict=True)])
            save_file({"whole": whole}, folder / "whole.safetensors")
            ranks.say("score")
            verdict = ranks.answer()
        scores = [load_file(folder / f"scores-{r}.safetensors")["scores"] for r in range(TRAINERS)]
    trained = torch.stack(scores, 1).flatten(0, 1)  # rank r scored rows r, r + 2, ...
    rollout = torch.tensor([s.logprobs.raw for s in samples], dtype=torch.float64)
    print(
        f"{name}, head {args.head_dtype}: {rollout.numel()} tokens, mean logprob "
        f"{rollout.mean():.3f}\n  receipt: version {sent['version']}, digest "
        f"{sent['digest']:016x}, {sent['tensors']} tensors by {sent['transport']}\n  weights "
        f"after sampling: equal={verdict['equal']} ({verdict['tensors']} tensors of version "
        f"{verdict['version']})"
    )
    show("trainer - rollout", trained - rollout)
    exact = score(make_model(dtype, args.init).double(), whole)
    show("trainer - float64 module", trained - exact)
    show("rollout - float64 module", rollout - exact)
    return (trained - rollout).flatten()


class Ranks:
    """The trainer's processes; rank 0 answers."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def answer(self) -> dict[str, Any]:
        """Rank 0's next JSON line; ends this program when the ranks have ended."""
        assert self._processes[0].stdout is not None
        for line in self._processes[0].stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("the trainer ended before it answered")

    def say(self, word: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()


@contextlib.contextmanager
def trainers(args: argparse.Namespace, dtype: str, address: str, folder: Path) -> Iterator[Ranks]:
    command = [sys.executable, __file__, "--dtypes", dtype, "--init", args.init]
    command += ["--head-dtype", args.head_dtype, "--address", address, "--folder", str(folder)]
    interface = "lo" if sys.platform == "linux" else "lo0"
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": interface}
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
        )
        for rank in range(TRAINERS)
    ]
    try:
        yield Ranks(processes)
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# ---- a trainer rank ----


def run_trainer(args: argparse.Namespace) -> None:
    """Send the weights, wait for "score", score this rank's sequences and compare the weights."""
    import torch.distributed as dist

    with trainer_group(args.folder / "rendezvous", args.rank, WAIT):
        model = sharded(getattr(torch, args.dtypes), args.init, args.head_dtype)
        with Rollout.connect(args.address, timeout=WAIT) as engine:
            receipt = engine.update_weights(model, timeout=WAIT)
            tell(
                args.rank,
                version=receipt.version,
                digest=receipt.digest,
                tensors=receipt.num_tensors,
                transport=receipt.transport,
            )
            if sys.stdin.readline().strip() != "score":
                return
            whole = load_file(args.folder / "whole.safetensors")["whole"]
            scores = score(model, whole[args.rank :: TRAINERS])
            save_file({"scores": scores}, args.folder / f"scores-{args.rank}.safetensors")
            report = engine.check_weights(model)
            dist.barrier()  # rank 0 answers when all have written
            tell(
                args.rank,
                equal=report.equal,
                tensors=report.num_tensors,
                version=report.version,
            )


def sharded(dtype: torch.dtype, init: str, head_dtype: str) -> PreTrainedModel:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(dtype, init)
    if head_dtype == "float32":
        head = model.lm_head
        head.forward = lambda x: F.linear(x.float(), head.weight.float())
    mesh = init_device_mesh("cpu", (TRAINERS,))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def tell(rank: int, **event: Any) -> None:
    if rank == 0:
        print(json.dumps(event), flush=True)


# ---- both ----


@torch.no_grad()
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
