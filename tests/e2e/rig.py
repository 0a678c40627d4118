"""Trainer jobs as processes, and what an engine says, for the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollout import Rollout, SamplingParams

HERE = Path(__file__).parent
PROMPTS = [[(7 * i + k) % 300 for i in range(70 + k)] for k in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True)


class Job:
    """A trainer job: the same command to every rank, one answer of each."""

    def __init__(self, kind: str, world: int, path: Path, log: Path) -> None:
        self.kind, self.world = kind, world
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        roots = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
        env = {
            **os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
            "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self.log = log
        self._log = log.open("wb")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "trainer_job.py"), kind, str(rank), str(world),
                 str(self._store.port), str(path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env,
            )
            for rank in range(world)
        ]  # fmt: skip
        self._lines: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in self.ranks]
        for process, lines in zip(self.ranks, self._lines, strict=True):
            threading.Thread(target=self._read, args=(process, lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    def answers(self, timeout: float) -> list[dict[str, Any] | None]:
        """One answer of each rank; None of a rank that has died."""
        got = [lines.get(timeout=timeout) for lines in self._lines]
        return [json.loads(line) if line else None for line in got]

    def ask(self, **command: Any) -> list[dict[str, Any] | None]:
        line = json.dumps(command).encode() + b"\n"
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self.answers(60)

    def close(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b'{"op": "end"}\n')
                process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._log.close()
        for left in Path("/dev/shm").glob("deepspeed_*"):
            left.unlink(missing_ok=True)


def start(path: Path, tp: int, **settings: Any) -> Rollout:
    return Rollout(
        str(path), tensor_parallel_size=tp, device="cpu", dtype="float32", num_threads=1,
        num_kv_blocks=256, max_model_len=512, timeout=10.0, **settings,
    )  # fmt: skip


def outcome(rollout: Rollout) -> list[Any]:
    """Tokens and exact logprobs of greedy and sampled continuations, from an empty cache."""
    rollout.reset_prefix_cache()
    rows = []
    for params in (GREEDY, SAMPLED):
        for output in rollout.generate(PROMPTS, params):
            sample = output.outputs[0]
            rows.append((sample.token_ids, sample.logprobs.raw, sample.logprobs.processed))
    return rows


def fill_prefix_cache(rollout: Rollout) -> None:
    rollout.generate(PROMPTS, GREEDY)
    assert rollout.generate(PROMPTS, GREEDY)[0].num_cached_tokens > 0
