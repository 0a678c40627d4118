"""What it costs that a rank is a process of its own, beside the same engine in one process.

    python benchmarks/rank_processes.py --sequences 1 32 256 --rounds 7
    python benchmarks/rank_processes.py --beside ANOTHER_CHECKOUT

Two engines of one tiny model, whose steps are nearly all overhead, take turns. Prints microseconds
of a step in both, of a round's least (what else runs on the machine only adds) the median over the
rounds, and tokens/s of the process as a share of those of one process. With `--beside` both
checkouts take turns in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rollout import Rollout, SamplingParams

PROMPT, VOCAB, TURNS = 16, 1000, 5
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
Found = dict[str, tuple[float, float]]  # by sequences: microseconds of a step, inline and not


def measure(counts: list[int], steps: int, threads: int, ahead: bool) -> Found:
    """One round: the least of ``TURNS`` turns of each."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        settings = {
            "skip_tokenizer_init": True, "load_format": "dummy", "device": "cpu",
            "dtype": "float32", "num_threads": threads, "max_num_seqs": max(counts),
            "enable_prefix_caching": False, "async_scheduling": ahead,
        }  # fmt: skip
        found: Found = {}
        with (
            Rollout(folder, executor="inline", **settings) as inline,
            Rollout(folder, executor="multiprocess", **settings) as process,
        ):
            for count in counts:
                pairs = [
                    (step_time(inline, count, steps), step_time(process, count, steps))
                    for _ in range(1 + TURNS)
                ][1:]
                here, there = map(min, zip(*pairs, strict=True))
                found[str(count)] = here, there
        return found


def step_time(rollout: Rollout, sequences: int, steps: int) -> float:
    """Microseconds of a step, of one call."""
    prompts = [[(7 * n + i) % VOCAB for i in range(PROMPT)] for n in range(sequences)]
    params = SamplingParams(max_tokens=steps, temperature=1.0, ignore_eos=True)
    started = time.perf_counter()
    rollout.generate(prompts, params)
    return (time.perf_counter() - started) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="the rank's")
    parser.add_argument("--ahead", action="store_true", help="steps begun before the last ended")
    parser.add_argument("--beside", help="another checkout")
    parser.add_argument("--json", action="store_true", help="one round, for the call of all rounds")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure(args.sequences, args.steps, args.threads, args.ahead)))
        return
    roots = {"here": str(Path(__file__).parents[1])}
    if args.beside:
        roots["beside"] = args.beside
    rounds: dict[str, list[Found]] = {name: [] for name in roots}
    for _ in range(args.rounds):
        for name, root in roots.items():
            rounds[name].append(_elsewhere(root))
    print("| | sequences | one process, us | a process of its own, us | share of tokens/s |")
    print("|---|---|---|---|---|")
    for name, found in rounds.items():
        for count in map(str, args.sequences):
            pairs = [each[count] for each in found]
            here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
            share = statistics.median(a / b for a, b in pairs)
            print(f"| {name} | {count} | {here:,.0f} | {there:,.0f} | {share:.2f} |")


def _elsewhere(root: str) -> Found:
    command = [sys.executable, __file__, "--json", *sys.argv[1:]]
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
