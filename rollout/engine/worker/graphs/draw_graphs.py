"""The draw behind a captured decode step, captured as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.fused_sampler import (
    Drawn,
    has_filters,
    is_edited,
    is_special,
    told,
)
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.worker.graphs.decode_inputs import DecodeInputs
from rollout.kernels import sample

_cuda: Any = torch.cuda  # parts of it have no types
_WARM_UPS = 2  # runs before a capture: kernels compile, libraries allocate their workspaces
T = TypeVar("T")


class CapturePool:
    """Memory of graphs that are never replayed at the same time, and the stream that they are
    captured on, ``stream`` where one is there already.

    One for all: torch finds room in what earlier captures took only where they were on the same
    stream, and a library's workspace, once made for a stream, stays.
    """

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        # Of high priority, which kernels keep in every replay: an update's copies give way.
        self.stream = _cuda.Stream(device, priority=-1) if stream is None else stream
        self._failed: list[Any] = []

    def renew(self, failed: Any) -> None:
        """After a capture that failed: the next ones go into other memory.

        Where the end of a capture fails torch 2.11 goes on taking what is allocated for the
        graph's, of which it asks ``failed``, and refuses the next capture into the same memory. For
        that of the device it can be told that this is over, for pinned memory nobody can.
        """
        device = torch.cuda.current_device()
        # Later releases end it themselves, or have no such calls.
        with suppress(RuntimeError, AttributeError):
            internals: Any = torch._C
            internals._cuda_endAllocateToPool(device, self.handle)
            internals._cuda_releasePool(device, self.handle)
        self.handle = torch.cuda.graph_pool_handle()
        self._failed.append(failed)


def capture(run: Callable[[], T], pool: CapturePool) -> tuple[Any, T]:
    """A graph of what ``run`` does, and what it gave: memory that every replay writes."""
    side, here = pool.stream, torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            run()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Thread-local: NCCL's watchdog and the staging thread may call CUDA meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool.handle, stream=side, capture_error_mode=mode):
            found = run()
    except BaseException:
        _cuda.set_stream(here)  # torch stays on its own where the capture's end fails
        pool.renew(graph)
        raise
    return graph, found


class DrawGraphs:
    """``FusedSampler`` by replay: its kernels over the logits of each captured size, the settings
    and random numbers out of ``inputs``, and tokens and logprobs into one memory.

    A graph of its own behind that of the forward pass: a step that needs another sampler does not
    pay for it, a rank that does not sample has none, and where it cannot be captured the others
    still are. Rows without filters have one of two launches, those with some one of many.
    ``logits``: [size, vocabulary] by size, written by each replay of the pass before.
    ``deterministic``: as ``FusedSampler``'s, all rows have that of many.
    """

    def __init__(
        self,
        logits: Mapping[int, Tensor],
        inputs: DecodeInputs,
        pool: CapturePool,
        deterministic: bool = False,
    ) -> None:
        self._deterministic = deterministic
        device = next(iter(logits.values())).device
        self._inputs, self._logits = inputs, logits
        self._given = torch.full((inputs.rows,), -1, dtype=torch.int64, device=device)
        # A row: its token, and three float32 in the words behind it.
        self._packed = torch.zeros(inputs.rows, 3, dtype=torch.int64, device=device)
        self._captured = {
            (size, filtered): capture(self._draw(rows, filtered), pool)
            for size, rows in logits.items()
            for filtered in ((True,) if deterministic else (False, True))
        }

    @staticmethod
    def takes(sampling: SamplingMetadata) -> bool:
        """Whether all rows draw, from these logits, and nothing that another sampler is for."""
        all_draw = sampling.num_sampled == sampling.num_rows
        return all_draw and not is_edited(sampling) and not is_special(sampling)

    def replay(self, size: int, sampling: SamplingMetadata) -> SamplerOutput:
        """What the rows of a step of ``size`` draw, those of ``sampling`` and no others; on the
        device, valid until the next call. The inputs hold their settings, and the logits are there.
        """
        count = sampling.num_rows
        filtered = self._deterministic or has_filters(sampling)
        graph, found = self._captured[size, filtered]
        graph.replay()
        drawn = Drawn(*(column[:count] for column in found))
        output = told(self._logits[size][:count], drawn, sampling)
        return replace(output, packed=self._packed[:count])

    def drop(self) -> None:
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured, self._logits = {}, {}

    def _draw(self, logits: Tensor, filtered: bool) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        size = len(logits)
        numbers, top_k, draws = self._inputs.settings(size)

        def run() -> tuple[Tensor, Tensor, Tensor]:
            given = self._given[:size]
            found = sample(logits, given, numbers, top_k, draws, filtered=filtered)
            tokens, scores, _ = found
            self._packed[:size, 0].copy_(tokens)
            self._packed.view(torch.float32)[:size, 2:5].copy_(scores)
            return found

        return run
