"""One rank of a trainer job that obeys commands: JSON lines on stdin, answers on stdout.

    python trainer_job.py RANK WORLD PORT KIND DIRECTORY     KIND: module | ddp | fsdp2 | zero3

Commands: {"op": "load", "path": DIR} takes the weights of a checkpoint; {"op": "become", "path":
DIR} goes on with the model of another, of any architecture; {"op": "beside", "path": DIR} also
builds a draft of it, of the same kind; {"op": "update", "address", "transport", "timeout",
"bucket_bytes", "encoding", "die_at": {rank: item}, "kill_sender_at": bucket, "die_at_commit": rank,
"beside": true for the draft, too, "keep": true to update through one connection} answers with the
receipt or the error;
{"op": "end"}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rollout import Rollout, RolloutError
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights.wanted import WantedWeights
from rollout.wire.codec import to_plain

ALIASES = {"lm_head.weight": "model.embed_tokens.weight"}


class Dying:
    """A source that kills its own process as it reaches an item."""

    def __init__(self, model: Any, at: int, timeout: float) -> None:
        self.agreement = detect(model).rank_group(timeout)
        self._at = at
        self._inner = detect(model).source(
            WantedWeights(aliases=ALIASES, dtype=torch.float32), group=self.agreement
        )

    def metadata(self) -> Any:
        return self._inner.metadata()

    def local_boxes(self) -> Any:
        return self._inner.local_boxes()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(self._inner):
            if index == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def build(kind: str, path: str, loaded: bool = False) -> tuple[Any, nn.Module]:
    """What the trainer passes to ``update_weights``, and the module whose weights it sets."""
    config = AutoConfig.from_pretrained(path)
    sees = hasattr(config, "vision_config")
    kinds: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    # What is loaded is in the dtypes of its files.
    model = kinds.from_pretrained(path) if loaded else kinds.from_config(config).float()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), model
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        text = model.model.language_model if sees else getattr(model, "model", model.base_model)
        layers = next(one for one in text.children() if isinstance(one, nn.ModuleList))
        for layer in (*layers, *(model.model.visual.blocks if sees else ())):
            fully_shard(layer)
        return fully_shard(model), model
    if kind == "zero3":
        return zero3(model)
    return model, model


def zero3(model: nn.Module) -> tuple[Any, nn.Module]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    return engine, engine.module


def load(kind: str, module: nn.Module, path: str) -> None:
    weights = load_file(os.path.join(path, "model.safetensors"))
    for name, parameter in module.named_parameters():
        value = weights[name].float()
        if kind == "fsdp2":
            from torch.distributed.tensor import distribute_tensor

            full = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(full)
        elif kind == "zero3":
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if dist.get_rank() == 0:
                    parameter.data.copy_(value)
        else:
            parameter.data.copy_(value)


def die_at_commit() -> None:
    """Kill this process before it hears whether the first rank has committed."""
    first_does: Any = RankGroup.first_does

    def dies(self: RankGroup, act: Any, timeout: float, phase: str, *more: Any, **to: Any) -> Any:
        if phase == "commit":
            os.kill(os.getpid(), signal.SIGKILL)
        return first_does(self, act, timeout, phase, *more, **to)

    RankGroup.first_does = dies  # type: ignore[method-assign]


kept: dict[str, Rollout] = {}  # address -> the connection that remembers what it has sent


def update(source: Any, rank: int, ask: dict[str, Any]) -> dict[str, Any]:
    transport: Any = ask["transport"]
    if (bucket := ask.get("kill_sender_at")) is not None:
        transport = Faulty(transport, Fault("kill", bucket=bucket))
    dying = ask.get("die_at", {})
    if dying:
        source = Dying(source, dying.get(str(rank), -1), ask["timeout"])
    if ask.get("die_at_commit") == rank:
        die_at_commit()
    started = time.monotonic()
    try:
        with ExitStack() as stack:
            rollout = kept.get(ask["address"])
            if rollout is None:
                rollout = Rollout.connect(ask["address"])
                if ask.get("keep"):
                    kept[ask["address"]] = rollout
                else:
                    stack.enter_context(rollout)
            receipt = rollout.update_weights(
                source,
                transport=transport,
                encoding=ask.get("encoding", "auto"),
                timeout=ask["timeout"],
                bucket_bytes=ask["bucket_bytes"],
            )
        answer: dict[str, Any] = {"receipt": to_plain(receipt)}
    except RolloutError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    return {**answer, "seconds": time.monotonic() - started}


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    kind, path = sys.argv[4:]
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not mix with the answers
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    source, module = build(kind, path)
    draft: Any = None
    print(json.dumps({"ready": rank}), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["op"] == "end":
            break
        if ask["op"] == "load":
            load(kind, module, ask["path"])
            answer: dict[str, Any] = {"loaded": ask["path"]}
        elif ask["op"] == "beside":
            draft, _ = build(kind, ask["path"], loaded=True)
            answer = {"beside": ask["path"]}
        elif ask["op"] == "become":
            source, module = build(kind, ask["path"], loaded=True)
            answer = {"became": ask["path"]}
        else:
            sent = {"policy": source, "draft": draft} if ask.get("beside") else source
            answer = update(sent, rank, ask)
        print(json.dumps(answer), file=answers, flush=True)
    for rollout in kept.values():
        rollout.shutdown()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
