"""Starts a job of several ranks as subprocesses that meet through a store of this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked import Script


def run_job(script: str, out: Path, *args: str, world: int = 2, timeout: float = 110) -> list[Any]:
    """Run ``jobs/<script>`` on every rank; what rank i wrote to ``out/<i>.json``, or its exit code.

    Every process has ended when this returns.
    """
    out.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(world):
        where = [str(rank), str(world), str(store.port), str(out), *args]
        env = {"LOCAL_RANK": str(rank)}  # DeepSpeed insists
        path = Path(__file__).parent / script
        ranks.append(Script(path, where, out / f"{rank}.log", env, talks=False))
    try:
        codes = [process.wait(timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.close()
    results = []
    for rank, code in enumerate(codes):
        path = out / f"{rank}.json"
        if code > 0 or code == -6 or (code == 0 and not path.exists()):
            log_text = (out / f"{rank}.log").read_text()
            raise AssertionError(f"rank {rank} ended with {code}:\n{log_text}")
        results.append(json.loads(path.read_text()) if path.exists() else code)
    return results
