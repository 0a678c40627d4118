"""What streaming clients see of a commit: true spans under load, and the stall of the receipt."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.weight_sync.trainer.options import IN_FLIGHT

pytestmark = pytest.mark.usefixtures("forked_ranks")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLIENTS, UPDATES = 6, 3
MARGIN = 0.15  # seconds that a busy machine may take a thread's turn away


def rescorer(path: Path, weights_of: Any) -> Any:
    spec = importlib.util.spec_from_file_location("rescore", BENCHMARKS / "rescore.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rescore"] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module.Rescorer(str(path), weights_of)


@pytest.fixture(
    scope="module",
    params=[("qwen3", 1), ("qwen3", 2), pytest.param(("qwen3_5", 2), marks=pytest.mark.more)],
)
def kind(request):
    """An architecture and its ranks; the last has recurrent states."""
    return request.param


@pytest.fixture(scope="module")
def path(kind, tmp_path_factory):
    return tmp_path_factory.mktemp("around") / "model"


@pytest.fixture(scope="module")
def sets(kind, path, tmp_path_factory):
    """Weights by version modulo their number; the first are the checkpoint's."""
    other = tmp_path_factory.mktemp("other")
    models = [write_tiny(path, kind[0]), write_tiny(other, kind[0], seed=1)]
    return [dict(model.state_dict()) for model in models]


@pytest.fixture(scope="module")
def rollout(kind, path, sets):
    with Rollout(
        str(path), tensor_parallel_size=kind[1], device="cpu", dtype="float32",
        num_threads=1, num_kv_blocks=256, max_model_len=512, timeout=20.0, undo="host",
    ) as running:  # fmt: skip
        yield running


class Client(threading.Thread):
    """Streams one request after the other; keeps when each token came, and the last outputs."""

    def __init__(self, rollout: Rollout, number: int, tokens: int = 160) -> None:
        super().__init__()
        self.rollout, self.number, self.tokens = rollout, number, tokens
        self.over = threading.Event()
        self.arrived: list[tuple[float, int]] = []  # seconds, version of the newest token
        self.outputs: list[Any] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                seed = 100 * self.number + len(self.outputs)
                params = SamplingParams(max_tokens=self.tokens, ignore_eos=True, seed=seed)
                prompt = [3 + self.number, *range(40, 46)]
                last = None
                for output in self.rollout.stream(prompt, params):
                    if output.outputs[0].token_ids:
                        version = output.outputs[0].weight_versions[-1].version
                        self.arrived.append((time.perf_counter(), version))
                    last = output
                self.outputs.append((prompt, last.outputs[0]))
        except BaseException as error:
            self.error = error


def running(rollout: Rollout, count: int, tokens: int = 160) -> list[Client]:
    clients = [Client(rollout, number, tokens) for number in range(count)]
    for client in clients:
        client.start()
    deadline = time.monotonic() + 20
    while not all(client.arrived for client in clients):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return clients


def ended(clients: list[Client]) -> list[Any]:
    for client in clients:
        client.over.set()
    for client in clients:
        client.join(60)
        assert not client.is_alive()
        assert client.error is None
    return [output for client in clients for output in client.outputs]


@pytest.mark.parametrize(
    "in_flight",
    [pytest.param(how, marks=pytest.mark.more) if how == "pin" else how for how in IN_FLIGHT],
)
def test_spans_are_true_under_load(rollout, path, sets, in_flight) -> None:
    first = rollout.weight_version
    content = {first: rollout_content(rollout, sets)}
    clients = running(rollout, CLIENTS)
    for _ in range(UPDATES):
        which = 1 - content[rollout.weight_version]
        receipt = rollout.update_weights(sets[which], in_flight=in_flight, timeout=20)
        content[receipt.version] = which
        time.sleep(0.2)
    deadline = time.monotonic() + 20
    while in_flight == "pin" and min(c.arrived[-1][1] for c in clients) < rollout.weight_version:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    outputs = ended(clients)
    scored = rescorer(path, lambda version: sets[content[version]])
    for prompt, completion in outputs:
        scored.check(prompt, completion)
    assert scored.scores.wrong == []
    assert scored.scores.checked > 200
    across = [c for _, c in outputs if len(c.weight_versions) > 1]
    reasons = {c.finish_reason for _, c in outputs}
    made = {span.version for _, c in outputs for span in c.weight_versions}
    assert made >= {first + UPDATES}
    if in_flight == "keep":
        assert scored.scores.mixed > 0
        assert any(len(c.kv_spans) > 1 for c in across)
    elif in_flight == "recompute":
        assert across
        assert all(len(c.kv_spans) == 1 for _, c in outputs)
        assert all(c.kv_spans[0].version == c.weight_versions[-1].version for c in across)
    else:
        assert across == []
    assert reasons == ({"abort", "length"} if in_flight == "abort" else {"length"})


@pytest.mark.parametrize("staging", ["auto", "none"])
def test_the_stall_of_the_receipt_is_the_gap_that_clients_see(rollout, sets, staging) -> None:
    clients = running(rollout, 2, tokens=450)

    def slowly() -> Any:
        for name, tensor in sets[1].items():
            time.sleep(0.03)
            yield name, tensor

    receipt = rollout.update_weights(slowly(), staging=staging, timeout=20)
    ended(clients)
    stall = receipt.timings["stall"]
    assert (stall > 0.3) == (staging == "none")
    seen = 0
    for client in clients:
        gaps = [(b[0] - a[0], a[1], b[1]) for a, b in pairwise(client.arrived)]
        at = [gap for gap, old, new in gaps if old != new and new == receipt.version]
        step = max(gap for gap, old, new in gaps if old == new)
        if not at:
            continue  # it was between two requests
        seen += 1
        assert stall <= at[0] + 0.02
        assert at[0] <= stall + step + MARGIN
    assert seen


def rollout_content(rollout: Rollout, sets: list[dict[str, Any]]) -> int:
    return next(i for i, weights in enumerate(sets) if rollout.check_weights(weights).equal)
