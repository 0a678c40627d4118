"""One rank of an FSDP2 trainer that is also a rank of the engine; obeys JSON lines on stdin.

python ranks_job.py RANK WORLD PORT DIRECTORY
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import Rollout, RolloutError

SETTINGS = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 256}


class Rank:
    """What the commands act on."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank = rank
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).float()
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.rollout: Any = None

    def start(self, path: str, **settings: Any) -> None:
        self.rollout = Rollout.from_ranks(path, meet_timeout=60, **{**SETTINGS, **settings})

    def start_otherwise(self, path: str) -> None:
        """With settings that differ by rank."""
        self.start(path, max_model_len=128 + self.rank)

    def stop(self) -> None:
        self.rollout.shutdown()

    def load(self, path: str) -> None:
        """Take a checkpoint's weights, each rank its shards."""
        from torch.distributed.tensor import distribute_tensor

        weights = load_file(os.path.join(path, "model.safetensors"))
        for name, parameter in self.model.named_parameters():
            whole = distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
            parameter.data.copy_(whole)

    def generate(self, prompts: Any, by_rank: bool = False, **params: Any) -> list[Any]:
        if by_rank:
            prompts = [[*prompt, self.rank + 1] for prompt in prompts]
        return [
            [
                sample.token_ids, sample.logprobs.raw, sample.text,
                [[s.version, s.start, s.stop] for s in sample.weight_versions],
            ]
            for output in self.rollout.generate(prompts, params)
            for sample in output.outputs
        ]  # fmt: skip

    def embed(self, prompts: Any, **options: Any) -> list[Any]:
        return [output.embedding for output in self.rollout.embed(prompts, **options)]

    def update(self, **options: Any) -> dict[str, Any]:
        return self._receipt(self.model, **options)

    def update_gathered(self) -> dict[str, Any]:
        return self._receipt((n, p.full_tensor()) for n, p in self.model.named_parameters())

    def update_short(self) -> dict[str, Any]:
        """Without one tensor; every rank goes on to gather all the same."""
        rows = list(self.model.named_parameters())[:-1]
        return self._receipt((n, p.full_tensor()) for n, p in rows)

    def update_raising(self, by: int) -> dict[str, Any]:
        """From an iterator that fails on one rank, in the middle."""
        rows = [(n, p.full_tensor()) for n, p in self.model.named_parameters()]

        def items() -> Iterator[Any]:
            yield from rows[:3]
            if self.rank == by:
                raise ValueError("tripped")
            yield from rows[3:]

        return self._receipt(items())

    def update_without(self) -> dict[str, Any]:
        """Of a dict, which one rank has not got."""
        whole = {n: p.full_tensor() for n, p in self.model.named_parameters()}
        return self._receipt(None if self.rank else whole)

    def update_otherwise(self) -> dict[str, Any]:
        """Of a model that one rank takes for its own."""
        whole = {n: p.full_tensor() for n, p in self.model.named_parameters()}
        return self._receipt(whole if self.rank else self.model)

    def update_nan(self) -> dict[str, Any]:
        if self.rank == 1:  # in this rank's shard alone
            next(self.model.parameters()).detach().to_local()[0, 0] = float("nan")
        return self._receipt(self.model)

    def equal(self) -> bool:
        return bool(self.rollout.check_weights(self.model).equal)

    def sleep(self, level: int) -> None:
        self.rollout.sleep(level)

    def wake(self, tags: list[str] | None = None) -> None:
        self.rollout.wake_up(tags)

    def version(self) -> int:
        return int(self.rollout.weight_version)

    def part(self) -> None:
        """Rank 0 and the others come with different calls."""
        if self.rank:
            self.rollout.sleep()
        else:
            self.rollout.wake_up()

    def fork(self, verb: str, **given: Any) -> int:
        """A child of this rank calls ``verb`` and ends; its status, 7 where it was refused."""
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.alarm(60)
        try:
            getattr(self, verb)(**given)
        except RolloutError as error:
            sys.exit(7 if "forked" in str(error) else str(error))
        sys.exit(0)

    def go_on(self) -> int:
        """The pid of a child that goes on, as a DataLoader's worker, without this rank's pipes."""
        if child := os.fork():
            return child
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
                    os.close(int(number))
        time.sleep(60)
        os._exit(0)

    def die(self, prompts: Any, rank: int) -> list[Any]:
        """That rank is killed while the other one generates."""
        if self.rank == rank:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        return self.generate(prompts, max_tokens=200, ignore_eos=True, temperature=1.0)

    def _receipt(self, source: Any, **options: Any) -> dict[str, Any]:
        receipt = self.rollout.update_weights(source, timeout=20, **options)
        return {
            "version": receipt.version, "digest": receipt.digest, "transport": receipt.transport
        }  # fmt: skip


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not mix with the answers
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    job = Rank(rank, sys.argv[4])
    print(json.dumps({"ready": rank}), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if (op := ask.pop("op")) == "end":
            break
        began = time.monotonic()
        try:
            answer = {"done": getattr(job, op)(**ask)}
        except RolloutError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answer["seconds"] = time.monotonic() - began
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
