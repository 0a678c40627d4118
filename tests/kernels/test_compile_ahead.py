"""Every Triton kernel compiles for sm_90, in the shapes that real models launch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = 227 * 1024  # bytes that one program may have on sm_90


no_triton = importlib.util.find_spec("triton") is None


@pytest.mark.skipif(no_triton, reason="no Triton here")
def test_a_kernel_is_compiled_once_for_all_numbers_of_tokens_and_sequences() -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_ahead.py"), "batches"],
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, list[int]]] = {}
    for line in done.stdout.splitlines():
        key, tokens, compiled = json.loads(line)
        found.setdefault(str(key), {}).setdefault(compiled, []).append(tokens)
    assert {key.split("'")[1] for key in found} >= {"_normalise", "_attend", "_multiply", "_score"}
    assert {key: each for key, each in found.items() if len(each) > 1} == {}


@pytest.mark.more
@pytest.mark.skipif(no_triton, reason="no Triton here")
def test_every_kernel_compiles_for_sm_90_and_fits_its_shared_memory() -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "compile_ahead.py"), share, "2"],
            env={**env, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in "01"
    ]
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=270)
            assert process.returncode == 0, errors
            found += [json.loads(line) for line in out.splitlines()]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [row for row in found if "error" in row]
    assert not failed, json.dumps(failed, indent=1)
    assert [row for row in found if row["shared"] > SHARED_MEMORY] == []
    # Of float32, which few run on a card, products hold their operands in registers.
    exact = "_attend(float32"
    assert [r for r in found if r["spills"] > 128 and not r["kernel"].startswith(exact)] == []
    overlapping = {"rms_norm", "add_rms_norm", "paged_attention"}
    overlapping |= {"rope_and_cache", "norm_rope_and_cache", "linear", "gated_linear"}
    assert {row["op"] for row in found if row["waits"] is not None} == overlapping
    assert [row for row in found if row["waits"] is False] == []
    # Else a rounding of products to 16 bits is passed over: that was seen on a card.
    turns = [row for row in found if "rope_and_cache" in row["op"]]
    assert [row for row in turns if row["contracts"] and "NORM=False" in row["kernel"]] == []
    # Regions of whole blocks are read in words of 16 bytes; a thread has 8 elements.
    regions = [row for row in found if "_regions" in row["op"] and "WHOLE=True" in row["kernel"]]
    regions = [row for row in regions if "uint8" not in row["kernel"]]
    assert {row["words"] for row in regions} == {True}
    with_kernels = {p.parent.name for p in (ROOT / "rollout/kernels").glob("*/gpu.py")}
    products = {"gated_linear"}  # launches silu_mul behind the library's product
    assert {row["op"] for row in found} >= with_kernels - products
