"""What is to run on a card runs on a pretended one, where there is no other: see ``pretended``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PATHS = (HERE / "pretended", HERE.parents[1], HERE.parent)


def _run(*command: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "TRITON_INTERPRET": "1",
        # A row's bits do not depend on its place in a tile there, as on a card: they do in the
        # kernels for AVX2 by which numpy multiplies on some CPUs.
        "OPENBLAS_CORETYPE": "Sandybridge",
        "TMPDIR": str(tmp_path),
    }
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=880
    )


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="there is a card, or no Triton",
)


LEFT_OUT = (
    "engine[ipc]", "lie[float32]", "overlapping", "gives[llama]", "gives[mixtral]",
    "gives[qwen3_moe]",
)  # fmt: skip


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "file", ["test_on_a_card.py", "test_prompts_on_a_card.py", "test_fleet_on_a_card.py"]
)
def test_what_is_to_run_on_a_card_runs_on_a_pretended_one(tmp_path: Path, file: str) -> None:
    done = _run(
        *("-m", "pytest", "-q"),
        *("-W", "ignore::RuntimeWarning"),  # numpy's, of padding rows
        *("-W", "ignore::DeprecationWarning"),  # Triton 3.6's use of numpy
        *("-p", "no:cacheprovider", str(HERE / file)),
        # What engine[auto] takes, without the cast of lie[bfloat16], and what is one at a time.
        # Of architectures those with a layer that no other has.
        *("-k", " and ".join(f"not {name}" for name in LEFT_OUT)),
        tmp_path=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "skipped" not in done.stdout


MISTAKES = {
    "on the same device": "torch.ones(2, device='cuda') + torch.ones(2)",
    "type tensor to numpy": "torch.ones(2, device='cuda').numpy()",
    "stream is capturing": (
        "x = torch.ones(2, device='cuda')\n"
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "    x.sum().item()"
    ),
    "a copy from the host: operation not permitted when stream is capturing": (
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n    torch.tensor([1.0], device='cuda')"
    ),
    "[[-1.0, 3.0]]": (  # is captured
        "from rollout.weights.quantization import MXFP4\n"
        "codes, graph = torch.full((1, 1), 0x5A, device='cuda'), torch.cuda.CUDAGraph()\n"
        "MXFP4.values(codes)\n"
        "with torch.cuda.graph(graph):\n"
        "    found = MXFP4.values(codes)\n"
        "raise SystemExit(str(found.tolist()))"
    ),
    "a tensor of the host": (
        "import triton, triton.language as tl\n"
        "from rollout.kernels import silu_mul\n"
        "silu_mul.implementation('triton')(torch.ones(2, 64))"
    ),
    "165": (  # the bytes of host memory that nobody has waited for
        "x = torch.empty(2, dtype=torch.uint8, pin_memory=True)\n"
        "x.copy_(torch.ones(2, dtype=torch.uint8, device='cuda'), non_blocking=True)\n"
        "raise SystemExit(str(x.tolist()))"
    ),
    "[165, 165]": (  # another stream was waited for
        "x = torch.empty(2, dtype=torch.uint8, pin_memory=True)\n"
        "x.copy_(torch.ones(2, dtype=torch.uint8, device='cuda'), non_blocking=True)\n"
        "torch.cuda.Stream().synchronize()\n"
        "raise SystemExit(str(x.tolist()))"
    ),
    "add on stream 1 reads what mul_ on stream 0 may still write": (
        "x, stream = torch.ones(2, device='cuda'), torch.cuda.Stream()\n"
        "stream.wait_stream(torch.cuda.current_stream())\n"
        "x *= 2\n"
        "with torch.cuda.stream(stream):\n"
        "    x + 1"
    ),
    "fill_ on stream 0 writes what _gate on stream 1 may still read": (
        "from rollout.kernels import silu_mul\n"
        "x, stream = torch.ones(2, 64, device='cuda'), torch.cuda.Stream()\n"
        "stream.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(stream):\n"
        "    silu_mul.implementation('triton')(x)\n"
        "x.fill_(2)"
    ),
    "nothing was refused": (
        "x, stream, event = torch.ones(2, device='cuda'), torch.cuda.Stream(), torch.cuda.Event()\n"
        "here = torch.cuda.current_stream()\n"
        "stream.wait_stream(here)\n"
        "with torch.cuda.stream(stream):\n"
        "    x *= 2\n"
        "    event.record()\n"
        "here.wait_event(event)\n"
        "y = x + 1\n"
        "here.synchronize()\n"
        "with torch.cuda.stream(stream):\n"
        "    x.fill_(y[0].item())\n"
        "stream.synchronize()\n"
        "del x, y\n"
        "torch.ones(2, device='cuda')"
    ),
    "mul on stream 1 may still be at it": (  # and the next tensor of stream 0 takes its place
        "x, stream = torch.ones(2, device='cuda'), torch.cuda.Stream()\n"
        "stream.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(stream):\n"
        "    y = x * 2\n"
        "del x\n"
        "torch.ones(2, device='cuda')"
    ),
    "a wait for an event on GPU 0, where this process has no context": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "torch.cuda.set_device(1)\n"
        "event = torch.cuda.Event()\n"
        "event.record()\n"
        "ThreadPoolExecutor().submit(event.synchronize).result()"
    ),
    "changed before it was read": (
        "x = torch.ones(2).pin_memory()\n"
        "y = x.to('cuda', non_blocking=True)\n"
        "x += 1\n"
        "torch.cuda.synchronize()"
    ),
    "stale": (
        "x, graph = torch.ones(2, device='cuda'), torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    y = x + 1\n"
        "x += 1\n"
        "graph.replay()\n"
        "assert y.tolist() == [3, 3]\n"  # what lies where it lay
        "x.data = x + 1\n"
        "graph.replay()\n"
        "assert y.tolist() == [4, 4], 'stale'"  # what has moved
    ),
    "least 8.0. Your T4 GPU has compute capability 7.5; use dtype='float16'": (
        "import tempfile; from pathlib import Path; from types import SimpleNamespace\n"
        "from tiny_models import write_tiny\n"
        "from rollout.config import EngineConfig; from rollout.server.preflight import check\n"
        "path = Path(tempfile.mkdtemp())\n"
        "write_tiny(path, 'qwen3', dtype=torch.bfloat16)\n"
        "card = SimpleNamespace(name='T4', major=7, minor=5)\n"
        "torch.cuda.get_device_properties = lambda _: card\n"
        "check(EngineConfig(model=str(path), device='cuda'))"
    ),
}


# One process imports everything and is forked for each mistake.
EACH = """
import gc, json, os, sys, traceback
import torch, triton
import tiny_models, rollout.kernels, rollout.server.preflight, rollout.weights.quantization

gc.freeze()
for number, code in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        said = "nothing was refused"
        try:
            exec(code, {"torch": torch})
        except BaseException:
            said = traceback.format_exc()
        with open(os.path.join(sys.argv[2], str(number)), "w") as file:
            file.write(said)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_pretended_card_refuses_what_a_card_refuses(tmp_path: Path) -> None:
    done = _run("-c", EACH, json.dumps(list(MISTAKES.values())), str(tmp_path), tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    told = {said: (tmp_path / str(n)).read_text() for n, said in enumerate(MISTAKES)}
    assert not {said: text for said, text in told.items() if said not in text}
