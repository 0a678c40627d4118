"""THE property: a live update equals a fresh start from the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file
from start_engines import fill_prefix_cache, outcome
from transformers import AutoModelForCausalLM

from rollout.weight_sync.agreement import Agreement
from rollout.weights import TensorMeta

BUCKET = 16 << 10


class Own:
    """A trainer of another framework: its own ``WeightSource``."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.agreement = Agreement()
        self._weights = weights

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self._weights.items())

    def local_boxes(self):
        return []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.items()


def source(kind: str, path):
    if kind == "directory":
        return path
    if kind == "module":
        return AutoModelForCausalLM.from_pretrained(path)
    weights = load_file(path / "model.safetensors")
    return {"dict": weights, "iterable": iter(weights.items()), "own": Own(weights)}[kind]


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
@pytest.mark.parametrize("kind", ["iterable", "dict", "module", "directory", "own"])
def test_from_this_process(engine, fresh, checkpoints, kind, transport) -> None:
    for name in ("b", "a"):
        fill_prefix_cache(engine)
        before = engine.weight_version
        receipt = engine.update_weights(
            source(kind, checkpoints[name]), transport=transport, bucket_bytes=BUCKET, timeout=10
        )
        assert receipt.version == engine.weight_version == before + 1
        output = engine.generate([[7 * i % 300 for i in range(70)]])[0]
        assert output.num_cached_tokens == 0  # what older weights cached cannot match
        assert outcome(engine) == fresh[name]


@pytest.mark.parametrize("transport", ["inline", "broadcast", "p2p"])
@pytest.mark.parametrize("kind", ["module", "ddp", "fsdp2", "zero3"])
def test_from_an_independent_job(engine, fresh, checkpoints, jobs, kind, transport) -> None:
    job = jobs[kind]
    for name in ("b", "a"):
        job.ask(op="load", path=str(checkpoints[name]))
        fill_prefix_cache(engine)
        answers = job.ask(
            op="update", address=engine.address, transport=transport, timeout=10,
            bucket_bytes=BUCKET,
        )  # fmt: skip
        assert None not in answers, job.log.read_text()
        receipts = [answer.get("receipt", answer) for answer in answers]
        assert all(receipt == receipts[0] for receipt in receipts), receipts
        assert receipts[0].get("version") == engine.weight_version
        assert receipts[0]["transport"] == transport
        assert outcome(engine) == fresh[name]
