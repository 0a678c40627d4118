"""What a decode step costs the engine's own thread, with ranks that answer at once.

    python benchmarks/host_work.py --sequences 256
    python benchmarks/host_work.py --sequences 256 --beside ANOTHER_CHECKOUT --rounds 5
    python benchmarks/host_work.py --sequences 64 --prompt 8192 \\
        --sampling '{"repetition_penalty": 1.1}'

Prints milliseconds of a step, medians over its steps: "schedule", "build" (its arrays), "book"
(tokens to their sequences) and "publish", as `rollout bench --profile` names them, "read" (a
rank's: arrays to batch and settings) and the whole loop with what lies between them. With
`--beside` both checkouts take turns in processes of their own, and the ratios of their medians
are printed, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import beside
import torch
from torch import Tensor

import rollout.engine.loop as loop_module
from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.engine.steps.batch import decode_batch
from rollout.generation import Request, SamplingParams
from rollout.wire.frames import Reply

VOCAB = 1000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
INFO = {
    "device": "cpu", "version": 0, "hidden_states": False, "free_bytes": 1 << 30,
    "weight_bytes": 1000, "kv_block_bytes": 100, "rank": 0, "bytes_read": 0, "read_seconds": 0.0,
    "seconds": 0.0,
}  # fmt: skip


class AnswersAtOnce:
    """An executor whose one rank reads a step's arrays and draws tokens without a model."""

    size = 1

    def __init__(self) -> None:
        self.on_death: Any = None
        self.read = decode_batch

    def start(self) -> None: ...

    def close(self) -> None: ...

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]:
        future: Future[Reply] = Future()
        if method != "step":
            future.set_result((INFO if method == "info" else {}, {}))
            return [future]
        _, sampling = self.read(args, tensors or {})
        scores = torch.full((sampling.num_rows,), -1.5)
        tokens = torch.randint(3, VOCAB, (sampling.num_rows,))
        found = {"tokens": tokens, **dict.fromkeys(("raw", "processed", "log_kept_mass"), scores)}
        future.set_result(({"version": 0}, found))
        return [future]


def measure(
    sequences: int, prompt: int, steps: int, stream: bool, sampling: Mapping[str, Any]
) -> dict[str, float]:
    """Milliseconds of a step, by what they go into."""
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*args)
            finally:
                times[name].append(time.perf_counter() - started)

        return measured

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        config = EngineConfig(
            model=folder, skip_tokenizer_init=True, max_num_seqs=sequences, device="cpu",
            num_kv_blocks=sequences * (-(-(prompt + steps) // 16) + 2), block_size=16,
            max_num_batched_tokens=max(2048, sequences * prompt), async_scheduling=False,
        )  # fmt: skip
        executor = AnswersAtOnce()
        core = EngineCore(config, executor=executor)  # type: ignore[arg-type]
        core.start()
    try:
        loop: Any = core.loop
        executor.read = timed("read", executor.read)
        if hasattr(loop, "encoder"):
            loop.encoder.encode = timed("build", loop.encoder.encode)
        else:  # a checkout from before it
            loop_module.encode_batch = timed("build", loop_module.encode_batch)  # type: ignore
        core.scheduler.schedule = timed("schedule", core.scheduler.schedule)  # type: ignore
        core.outputs.step = timed("book", core.outputs.step)  # type: ignore
        core.outputs.publish = timed("publish", core.outputs.publish)  # type: ignore
        loop._step = timed("step", loop._step)
        done = threading.Event()
        params = SamplingParams(**{"max_tokens": steps, "temperature": 1.0, **sampling})
        left = {f"r{n}" for n in range(sequences)}

        def sink(item: Any) -> None:
            if isinstance(item, BaseException) or item.finished:
                left.discard(getattr(item, "request_id", ""))
            if isinstance(item, BaseException) or not left:
                done.set()

        requests = [
            Request(
                request_id=f"r{n}",
                prompt_token_ids=tuple((7 * n + i) % VOCAB for i in range(prompt)),
                params=params,
            )
            for n in range(sequences)
        ]
        core.submit(requests, sink, stream=stream)
        if not done.wait(600):
            raise SystemExit("the requests did not end")
    finally:
        core.close()
    return {name: statistics.median(found[2:-2]) * 1e3 for name, found in sorted(times.items())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stream", action="store_true", help="every token to its caller")
    parser.add_argument("--sampling", type=json.loads, default={}, help="JSON of SamplingParams")
    beside.add_flags(parser, rounds=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = ["--sequences", str(args.sequences), "--prompt", str(args.prompt)]
    words += ["--steps", str(args.steps), "--sampling", json.dumps(args.sampling)]
    words += ["--stream"] if args.stream else []
    given = args.sequences, args.prompt, args.steps, args.stream, args.sampling
    beside.run(args, lambda: measure(*given), words)


if __name__ == "__main__":
    main()
