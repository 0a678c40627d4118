"""What every job script does on its rank: join the job, stream sources, write down outcomes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from weight_sync_source.jobs.tiny import ALIASES

from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.trainer.sources.base import LocalSource, held_values
from rollout.weight_sync.trainer.sources.update import detect_update
from rollout.weights.wanted import WantedWeights

TIMEOUT = 40.0  # for what must succeed, also where a rank is slow to start
SHORT = 3.0  # for what must fail at its deadline


def held_where_they_lie(source: LocalSource, names: list[str]) -> None:
    """What is held is what ``local_values`` casts, and in the same memory whenever it is asked."""
    for name in names:
        held, again = held_values(source, name), held_values(source, name)
        if held is None or again is None:
            continue
        for (box, value), (_, other) in zip(held, again, strict=True):
            assert value.data_ptr() == other.data_ptr(), f"{name} is copied"
            cast = dict(source.local_values(name))[box]
            assert torch.equal(value.to(cast.dtype), cast), name


class Rank:
    def __init__(self) -> None:
        rank, world, port, out = sys.argv[1:5]
        self.rank, self.world, self.out = int(rank), int(world), Path(out)
        self.args = sys.argv[5:]
        self.outcome: dict[str, Any] = {}
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)

    def refused(self, name: str, obj: Any) -> None:
        """What this rank says of ``obj``, which it does not send."""
        try:
            detect_update(obj, {}).source(
                WantedWeights(aliases=ALIASES, dtype=torch.float32), timeout=TIMEOUT
            ).agreement.close()
            self.outcome[name] = None
        except Exception as error:
            self.outcome[name] = f"{type(error).__name__}: {error}"

    def gather(
        self,
        name: str,
        obj: Any,
        dtype: torch.dtype,
        partial: bool = False,
        adapters: dict[str, Any] | None = None,
    ) -> None:
        """Stream ``obj`` as the publisher does: a vote after each bucket; the sender saves all."""
        found_source = detect_update(obj, adapters or {})
        source = found_source.source(
            WantedWeights(aliases=ALIASES, dtype=dtype), timeout=TIMEOUT, partial=partial
        )
        metadata = source.metadata()
        found: dict[str, Tensor] = {}
        headers = []
        agreement = source.agreement
        packer = BucketPacker(400, "cpu" if agreement.is_sender else "meta")
        for tensor_name, tensor in source:
            if agreement.is_sender:
                found[tensor_name] = tensor.clone()
            for header, _ in packer.add(tensor_name, tensor):
                headers.append(header)
                agreement.vote(None, TIMEOUT, f"bucket {header.index}")
        agreement.close()
        if agreement.is_sender:
            save_file(found, self.out / f"{name}.safetensors")
        boxes = source.local_boxes()
        if isinstance(source, LocalSource):
            save_file(
                {
                    f"{n}/{index}": value.clone()
                    for n, _ in boxes
                    for index, (_, value) in enumerate(source.local_values(n))
                },
                self.out / f"{name}.{self.rank}.safetensors",
            )
            held_where_they_lie(source, [n for n, _ in boxes])
        self.outcome[name] = {
            "sender": agreement.is_sender,
            "kind": type(source).__name__,
            "names": list(found),
            "metadata": metadata and [[m.name, str(m.dtype), list(m.shape)] for m in metadata],
            "buckets": len(headers),
            "boxes": [[n, [[b.starts, b.stops] for b in held]] for n, held in boxes],
        }

    def failing(
        self,
        name: str,
        agreement: Agreement,
        items: Iterable[Any],
        step: Any,
        timeout: float = TIMEOUT,
    ) -> None:
        """Stream with a vote per tensor; records the error that ends it, and how long it took."""
        before = time.monotonic()
        error: BaseException | None = None
        iterator: Iterator[Any] = iter(items)
        try:
            for index in range(100):
                try:
                    before = time.monotonic()
                    step(index)
                    next(iterator)
                except Exception as failure:
                    error = failure
                agreement.vote(error, timeout, f"tensor {index}")
        except Exception as final:
            self.outcome[name] = {
                "type": type(final).__name__,
                "message": str(final),
                "cause": type(final.__cause__).__name__,
                "seconds": time.monotonic() - before,
            }
        finally:
            agreement.close()

    def finish(self) -> None:
        (self.out / f"{self.rank}.json").write_text(json.dumps(self.outcome))
