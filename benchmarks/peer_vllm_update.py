"""Seconds of vLLM's `reload_weights` from tensors in its worker's memory; see `peer_vllm.py`.

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 python benchmarks/peer_vllm_update.py CHECKPOINT

The variable lets vLLM send the function below to its own worker. The tensors are loaded there
once, on `--device`, before the first of the updates that are timed. Beside the other variables of
`peer_vllm.py`.
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
    parser.add_argument("--device", default="cpu", help="where the tensors lie")
    args = parser.parse_args()
    engine = LLM(model=args.checkpoint, dtype="bfloat16", max_model_len=1024, enforce_eager=True)
    for _ in range(args.updates):
        seconds = engine.collective_rpc(reload, args=(args.checkpoint, args.device))[0]
        print(json.dumps({"seconds": seconds}), flush=True)


def reload(worker: Any, checkpoint: str, device: str) -> float:
    """On the worker; imports its own, for it travels without this file."""
    import time
    from pathlib import Path

    import torch
    from safetensors.torch import load_file

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if not hasattr(worker, "held"):
        files = sorted(Path(checkpoint).glob("*.safetensors"))
        read = (item for path in files for item in load_file(path).items())
        worker.held = {name: tensor.clone().to(device) for name, tensor in read}
    wait()
    start = time.perf_counter()
    worker.reload_weights(weights_iterator=iter(worker.held.items()))
    wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
