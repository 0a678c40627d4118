"""Transformers' modules over two ranks: an FSDP2 trainer makes the engine that its files would."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from start_engines import outcome, start, trainer_job
from tiny_models import write_tiny
from trainer_processes import Job

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import transformers_sweep

pytestmark = pytest.mark.usefixtures("forked_ranks")

SIZES = {"vocab_size": 301, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    where = tmp_path_factory.mktemp("trainer")
    write_tiny(where / "first", "qwen3")
    started = trainer_job("fsdp2", 2, where / "first", where / "log")
    try:
        assert None not in started.answers(120), started.log.read_text()
        yield started
    finally:
        started.close()


def _case(model_type: str, mark: pytest.MarkDecorator, plan: str) -> Any:
    return pytest.param(model_type, marks=mark, id=plan)


@pytest.mark.parametrize(
    "model_type",
    [
        _case("starcoder2", pytest.mark.more, "transformers' plan, biases of sums, a tied head"),
        _case("ernie4_5_moe", pytest.mark.soak, "transformers' plan, stacked experts"),
        _case("bloom", pytest.mark.more, "rollout's plan, q, k and v in one, over a cache"),
        _case("gpt2", pytest.mark.soak, "rollout's plan, inputs before outputs"),
    ],
)
def test_every_way_of_an_update_is_a_fresh_start(job: Job, tmp_path: Path, model_type: str) -> None:
    paths = [tmp_path / name for name in "abc"]
    architecture = dict(transformers_sweep.model_types())[model_type]
    models = [transformers_sweep.write(architecture, path, 0, SIZES) for path in paths[::2]]
    transformers_sweep.write(architecture, paths[1], 1, SIZES)
    with torch.no_grad():  # c: a few elements of a
        for parameter in models[1].parameters():
            parameter.view(-1)[::31] += 0.25
    models[1].save_pretrained(paths[2])
    wanted = []
    for path in paths[1:]:
        with start(path, 2) as fresh:
            wanted.append(outcome(fresh))
    with start(paths[0], 2) as engine:
        first = outcome(engine)
        assert len({str(each) for each in (first, *wanted)}) == 3

        def update(path: Path, transport: str, encoding: str = "full") -> dict[str, Any]:
            assert None not in job.ask(op="become", path=str(path)), job.log.read_text()
            answers = job.ask(
                op="update", address=engine.address, transport=transport, encoding=encoding,
                timeout=60, bucket_bytes=16 << 10, keep=True,
            )  # fmt: skip
            assert None not in answers, job.log.read_text()
            assert answers[0] is not None
            assert "receipt" in answers[0], answers
            receipt: dict[str, Any] = answers[0]["receipt"]
            assert receipt["transport"] == transport
            assert len(receipt["ranks"]) == 2
            return receipt

        update(paths[1], "broadcast")  # gathers
        assert outcome(engine) == wanted[0]
        engine.rollback()
        assert outcome(engine) == first
        full = update(paths[1], "p2p")  # each rank sends boxes of its own shards
        assert outcome(engine) == wanted[0]
        update(paths[0], "p2p")
        assert outcome(engine) == first
        for transport in ("broadcast", "inline"):
            update(paths[0], transport, "delta")  # keeps a copy
            delta = update(paths[2], transport, "delta")
            assert delta["details"]["encoding"] == "delta"
            assert delta["wire_bytes"] < full["wire_bytes"] / 2
            assert outcome(engine) == wanted[1]
            assert engine.check_weights(str(paths[2])).equal
