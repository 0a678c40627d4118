"""Seconds of vLLM's `reload_weights` from tensors in its worker's memory; see `peer_vllm.py`.

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 python benchmarks/peer_vllm_update.py CHECKPOINT

The variable lets vLLM send the function below to its own worker. The tensors are loaded there
once, before the first of the updates that are timed. Beside the other variables of `peer_vllm.py`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from vllm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--updates", type=int, default=6)
    args = parser.parse_args()
    engine = LLM(model=args.checkpoint, dtype="bfloat16", max_model_len=1024, enforce_eager=True)
    for _ in range(args.updates):
        seconds = engine.collective_rpc(reload, args=(args.checkpoint,))[0]
        print(json.dumps({"seconds": seconds}), flush=True)


def reload(worker: Any, checkpoint: str) -> float:
    """On the worker; imports its own, for it travels without this file."""
    import time
    from pathlib import Path

    from safetensors.torch import load_file

    if not hasattr(worker, "held"):
        files = sorted(Path(checkpoint).glob("*.safetensors"))
        worker.held = {n: t.clone() for path in files for n, t in load_file(path).items()}
    start = time.perf_counter()
    worker.reload_weights(weights_iterator=iter(worker.held.items()))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
