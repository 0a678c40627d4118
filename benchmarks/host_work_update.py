"""What an update of a trainer in the engine's own process costs the host, whatever the bytes take.

    python benchmarks/host_work_update.py --layers 32
    python benchmarks/host_work_update.py --layers 32 --beside ANOTHER_CHECKOUT --rounds 5

A Llama of so small matrices that copies and digests take no time is read where it lies, as from a
GPU: what is left is done for each tensor and each step of the protocol. Prints milliseconds of
processor time of all threads, and of wall clock, of an update after the first ones: the least of
all, as other work of the machine only adds to it. With `--beside` both checkouts take turns in
processes of their own, and the ratios of their medians over the rounds are printed, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import types
from typing import Any

import beside
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rollout.engine.worker.weight_reader as reading
import rollout.weight_sync.trainer.session as session
import rollout.weight_sync.trainer.sources.values as values
from rollout import Rollout


def take_cpu_for_a_gpu() -> None:
    """A CPU's tensors are read where they lie, and digested in few calls."""

    class Torch:
        cuda = types.SimpleNamespace(is_available=lambda: True)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    opener: Any = session.Opener
    made = opener._buckets
    opener._buckets = lambda self, *args, small: made(self, *args, small=True)
    vars(values)["torch"] = Torch()
    reading._alone = lambda model: False


def measure(layers: int, updates: int) -> dict[str, float]:
    """Milliseconds of an update, and how many tensors it has."""
    take_cpu_for_a_gpu()
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    busy, passed = [], []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with Rollout(
            folder, dtype="bfloat16", device="cpu", weight_layout="plain", num_threads=1,
            skip_tokenizer_init=True, max_model_len=128, kv_cache_bytes=1 << 22, max_num_seqs=4,
        ) as engine:  # fmt: skip
            for number in range(updates + 3):
                started, cpu = time.perf_counter(), time.process_time()
                receipt = engine.update_weights(model, encoding="full")
                if number >= 3:
                    passed.append(time.perf_counter() - started)
                    busy.append(time.process_time() - cpu)
    if receipt.details.get("read_in_place") != f"{receipt.num_tensors} tensors":
        raise SystemExit(f"not every tensor was read where it lies: {receipt.details}")
    tensors = float(receipt.num_tensors)
    return {"processor": min(busy) * 1e3, "wall clock": min(passed) * 1e3, "tensors": tensors}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--updates", type=int, default=100)
    beside.add_flags(parser, rounds=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = ["--layers", str(args.layers), "--updates", str(args.updates)]
    beside.run(args, lambda: measure(args.layers, args.updates), words)


if __name__ == "__main__":
    main()
