"""Gatherer x transport x encoding x tensor parallelism: what is live is what the trainer holds.

Every trainer job and every engine starts once; each combination is two updates between them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_ranks import Engine, same
from tiny_models import write_tiny
from trainer_processes import Job
from trainer_ranks import wanted_bytes
from weight_changes import CHANGES

from rollout.kernels import digest
from rollout.models.config.model import ModelConfig
from rollout.server.grpc.server import serve
from rollout.weights import Box

HERE = Path(__file__).parent
JOBS = {
    2: ("ddp", "fsdp2", "fsdp1", "zero2", "zero3"),
    4: ("hsdp", "fsdp1_hybrid", "fsdp2_tp"),
}
KINDS = {kind: world for world, kinds in JOBS.items() for kind in kinds}
TRANSPORTS = ("grpc_stream", "broadcast", "ipc", "p2p")
Weights = dict[str, torch.Tensor]
START_LIMIT = 240.0  # seconds: six processes of trainers on a busy machine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, Weights]:
    """One KV head, and heads and columns that 1, 2, 3 and 4 ranks can share; those of a block of
    128 and more, which two share so that none of 32 is cut."""
    where = tmp_path_factory.mktemp("model")
    shape = {"num_attention_heads": 12, "num_key_value_heads": 1, "intermediate_size": 192}
    model = write_tiny(where, "qwen3", tied=True, seed=5, **shape)
    return where, {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}


@pytest.fixture(scope="module")
def jobs(checkpoint, tmp_path_factory) -> Iterator[dict[int, Job]]:
    logs = tmp_path_factory.mktemp("jobs")
    started = {
        world: Job(HERE / "combination_job.py", world, logs / str(world),
                   str(checkpoint[0]), ",".join(kinds))
        for world, kinds in JOBS.items()
    }  # fmt: skip
    try:
        for job in started.values():
            if None in job.answers(START_LIMIT):
                raise AssertionError(job.log.read_text())
        yield started
    finally:
        for job in started.values():
            job.close()


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=["tp1", "tp2", "tp3", "tp4"])
def engine(request, checkpoint) -> Iterator[Engine]:
    directory, weights = checkpoint
    engine = Engine(ModelConfig.from_directory(directory), request.param, weights)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def address(engine) -> Iterator[str]:
    """Where the trainers' processes reach these ranks, through the real service."""
    with service_of(engine) as address:
        yield address


@contextmanager
def service_of(engine: Engine) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    served = run(serve(SimpleNamespace(backend=engine)))  # type: ignore[arg-type]
    yield served.address
    run(served.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


@pytest.fixture(scope="module")
def truths(checkpoint) -> dict[str, Weights]:
    """What each trainer holds by now."""
    return {kind: dict(checkpoint[1]) for kind in KINDS}


def digests(weights: Weights) -> dict[str, int]:
    return {n: digest(t, tuple(t.shape), Box.full(tuple(t.shape))) for n, t in weights.items()}


@pytest.mark.parametrize("kind", KINDS)  # varies fastest: another sender has committed last
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_live_is_what_the_trainer_holds(
    engine, address, jobs, truths, kind, transport
) -> None:
    def update(change: str, encoding: str) -> dict[str, Any]:
        truths[kind] = {name: CHANGES[change](t) for name, t in truths[kind].items()}
        answers = jobs[KINDS[kind]].ask(
            kind=kind, change=change, address=address, transport=transport, encoding=encoding,
            timeout=20.0, bucket_bytes=32 << 10,
        )  # fmt: skip
        assert None not in answers, jobs[KINDS[kind]].log.read_text()
        receipts = [answer.get("receipt", answer) for answer in answers]
        assert all(receipt == receipts[0] for receipt in receipts), receipts
        receipt = receipts[0]
        assert receipt.get("version") == engine.version, receipt
        assert receipt["transport"] == transport, receipt["details"]
        wanted = digests(truths[kind])
        assert receipt["digest"] == sum(wanted.values()) % 2**64
        assert engine.digests(20.0) == wanted  # of what lies in the ranks' memory
        assert receipt["num_bytes"] == sum(t.nbytes for t in truths[kind].values())
        return receipt

    first = update("all", "full" if transport == "p2p" else "delta")
    assert first["details"]["encoding"] == "full"
    if transport == "p2p":
        for receipt in (first, update("all", "full")):
            least = wanted_bytes(engine)
            assert least <= receipt["wire_bytes"] <= 1.01 * least
            sent = [int(part) for part in receipt["details"]["sent_bytes"].split(",")]
            assert len(sent) == KINDS[kind]
            assert max(sent) < 1.5 * sum(sent) / len(sent)
    else:
        second = update("few", "delta")
        assert second["details"]["encoding"] == "delta"
        assert second["wire_bytes"] < 0.06 * first["wire_bytes"]


def test_every_rank_ends_like_a_fresh_start(engine, address, jobs, truths, checkpoint) -> None:
    last = next(kind for kind in reversed(KINDS))
    fresh = Engine(ModelConfig.from_directory(checkpoint[0]), len(engine.ranks), truths[last])
    try:
        assert same(engine.live(), fresh.live())
    finally:
        fresh.close()


SHARDED = ("fsdp2", "broadcast"), ("fsdp2", "p2p")  # gathered, and by no gather
OTHERS = (
    ("zero3", "p2p"), ("fsdp2_tp", "p2p"), ("fsdp1", "ipc"), ("fsdp2", "grpc_stream"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "size", "ways"),
    [
        ("int8", 2, SHARDED + OTHERS),
        ("fp8", 2, SHARDED),
        ("fp8_block", 1, SHARDED),  # blocks that both trainer ranks have a part of
        ("mxfp4", 2, SHARDED),
    ],
    ids=["int8", "fp8", "fp8_block", "mxfp4"],
)
def test_quantised_ranks_hold_what_they_make_of_it(
    checkpoint, jobs, truths, scheme, size, ways
) -> None:
    """Gathered or not, whole rows or a part of each: as a fresh start has it, bit for bit."""
    config = ModelConfig.from_directory(checkpoint[0])
    engine = Engine(config, size, checkpoint[1], quantization=scheme)
    try:
        with service_of(engine) as address:
            for kind, transport in ways:
                truths[kind] = {name: CHANGES["all"](t) for name, t in truths[kind].items()}
                answers = jobs[KINDS[kind]].ask(
                    kind=kind, change="all", address=address, transport=transport,
                    encoding="full", timeout=20.0, bucket_bytes=32 << 10,
                )  # fmt: skip
                receipts = [answer.get("receipt", answer) for answer in answers]
                assert receipts[0].get("transport") == transport, receipts
                assert receipts[0]["details"]["quantization"] == scheme
                wanted = digests(truths[kind])
                assert receipts[0]["digest"] == sum(wanted.values()) % 2**64
                fresh = Engine(config, size, truths[kind], quantization=scheme)
                try:
                    assert same(engine.live(), fresh.live()), (kind, transport)
                finally:
                    fresh.close()
    finally:
        engine.close()
