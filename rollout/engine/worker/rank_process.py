"""The process of one rank: reads calls from its engine's socket, runs them, replies.

The engine's end of the socket is this process's life line: when it closes, the process ends at
once, even inside a collective.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import torch

from rollout.config import EngineConfig
from rollout.distributed.interpreter import SWITCH_INTERVAL, settle
from rollout.distributed.stage import place_of
from rollout.engine.steps.shared_payloads import PayloadViews
from rollout.engine.steps.step_ring import RankSteps
from rollout.engine.worker.job_thread import JobThread
from rollout.engine.worker.rank_loop import RankLoop
from rollout.engine.worker.worker import Worker
from rollout.wire.frames import recv_frame


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank on the inherited socket ``--fd`` until the other end closes."""
    parser = argparse.ArgumentParser(prog="python -m rollout.engine.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--shared-fd", type=int, help="memory of the ranks' collectives")
    parser.add_argument("--payload-fd", type=int, help="memory of large tensors of calls")
    parser.add_argument("--steps-fd", type=int, help="memory through which steps come")
    options = parser.parse_args(argv)
    sock = socket.socket(fileno=options.fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when its ranks end
    first = recv_frame(sock)
    if first is None:
        return
    header, _ = first
    rank, size = int(header["rank"]), int(header["size"])
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format=f"rollout rank {rank}: %(levelname)s %(name)s: %(message)s",
    )
    sys.setswitchinterval(SWITCH_INTERVAL)
    staging = JobThread("rollout-staging", num_threads=1)
    torch.set_num_threads(int(header["num_threads"]))
    config = EngineConfig.from_dict(header["config"])
    tp, stage = place_of(rank, config.tensor_parallel_size, config.pipeline_parallel_size)
    worker = Worker(config, tp, options.shared_fd, stage=stage)
    replies = JobThread("rollout-replies") if config.runs_ahead(worker.device.type) else None
    payloads = PayloadViews(options.payload_fd)
    steps = RankSteps.join(options.steps_fd, rank, size)
    loop = RankLoop(sock, worker, staging, payloads, replies, steps, end=os._exit, started=settle)
    loop.run()
