"""The C sources for other CPUs: compiled here, and run where this machine can."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.cases import attention, packed_linear
from torch import Tensor

from rollout.kernels import digest, linear, paged_attention
from rollout.kernels.digest import EXPONENTS
from rollout.kernels.native import library, native_status
from rollout.weights import Box

pytestmark = pytest.mark.more

TESTS = Path(__file__).parents[1]
SOURCES = Path(__file__).parents[2] / "rollout/kernels/native"
WARNINGS = ("-std=gnu11", "-O1", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
COMPILER = shutil.which(os.environ.get("CC", "gcc"))
ARM_COMPILER, ARM_EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
X86 = platform.machine() in ("x86_64", "AMD64")

# Every native op against its reference, on every conformance case that it takes.
CONFORMANCE = """
import torch
torch.set_num_threads(2)
from kernels.cases import DTYPES, all_cases
from kernels.test_conformance import _op, _outputs, _tolerance
from rollout.kernels.native import native_status
count = 0
for case in all_cases():
    op = _op(case.op)
    run = op.implementations().get("cpu")
    for dtype in DTYPES if run else ():
        relative, absolute = _tolerance(case, dtype)
        wanted = _outputs(op.reference, case, case.make(dtype))
        for a, b in zip(_outputs(run, case, case.make(dtype)), wanted, strict=True):
            torch.testing.assert_close(
                a, b, rtol=relative, atol=absolute, msg=lambda m: f"{case} {dtype}: {m}"
            )
        count += 1
from rollout.kernels import copy_into_box
from rollout.kernels.copy_into_box import cpu as native_write
from rollout.weights import Box, TileLayout
native_write.LEAST = 1
plain, copy_into_box.reference = copy_into_box.reference, None  # not to be fallen back to
tiles, shape = TileLayout(16), (96, 150)
value = torch.randn(shape, dtype=torch.bfloat16)
wanted, got = (torch.empty(tiles.storage_shape(shape), dtype=torch.bfloat16) for _ in "ab")
plain(wanted, shape, Box.full(shape), value, tiles)
copy_into_box(got, shape, Box.full(shape), value, tiles)
assert torch.equal(got, wanted)
print(count, native_status())
"""


@pytest.mark.skipif(not (X86 and COMPILER), reason="needs gcc on x86-64")
@pytest.mark.parametrize(
    "cpu",
    [
        "x86-64",
        "sapphirerapids",
        *(pytest.param(cpu, marks=pytest.mark.soak) for cpu in ("haswell", "skylake-avx512")),
    ],
)
def test_the_sources_compile_without_a_warning_for(cpu: str, tmp_path: Path) -> None:
    command = [str(COMPILER), "-c", *WARNINGS, f"-march={cpu}", *_sources()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not X86 or library() is None, reason="needs native kernels on x86-64")
@pytest.mark.parametrize(
    ("cpu", "bits"), [pytest.param("haswell", 256, marks=pytest.mark.soak), ("x86-64", 128)]
)
def test_ops_built_for_a_lesser_cpu_give_what_their_references_give(
    cpu: str, bits: int, tmp_path: Path
) -> None:
    if bits == 256 and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs AVX2")
    settings = {
        **os.environ,
        "ROLLOUT_KERNELS_TARGET": cpu,
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", CONFORMANCE],
        env=settings, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    count, _, status = done.stdout.partition(" ")
    assert int(count) > 100
    assert f"vectors of {bits} bits" in status


def test_the_status_names_the_vectors() -> None:
    assert ("vectors of " in native_status()) == (library() is not None)


# ---- Arm, cross-compiled and emulated ----


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Arm:
    if not (ARM_COMPILER and ARM_EMULATOR):
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64")
    program = tmp_path_factory.mktemp("arm") / "driver"
    others = [path for path in _sources() if not path.endswith("attention.c")]
    driver = str(Path(__file__).parent / "arm_driver.c")
    command = [ARM_COMPILER, "-static", *WARNINGS, f"-I{SOURCES}"]
    done = subprocess.run(
        [*command, driver, *others, "-lm", "-o", str(program)],
        capture_output=True, text=True, timeout=270,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Arm(program)


class Arm:
    """Runs one kernel under the emulator: integers and tensors in, bytes of the result out."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def __call__(self, name: str, integers: list[int], *tensors: Tensor | None) -> bytearray:
        given = struct.pack(f"<q{len(integers)}q", len(integers), *integers)
        for tensor in tensors:
            data = (
                b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
            )
            given += struct.pack("<q", len(data)) + data
        done = subprocess.run(
            [str(ARM_EMULATOR), str(self._program), name],
            input=given, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return bytearray(done.stdout)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str
)
def test_arm_digests_are_those_of_the_reference(arm: Arm, dtype: torch.dtype) -> None:
    values = torch.arange(7 * 203).view(7, 203).to(dtype)
    part = values[:, 3:200]  # rows of another stride than their length
    box = Box((0, 3), (7, 200))
    found = [0]
    if dtype.is_floating_point:
        part[2, 5] = part[6, 196] = float("nan")
    start = [dtype.itemsize, 7, 197, 203, 1, 3, 203, EXPONENTS.get(dtype, 0)]
    data = values.flatten()[3:]
    got = struct.unpack("<QQ", arm("digest", start, data))
    assert got == (digest.reference(part, (7, 203), box, found), *found)


@pytest.mark.parametrize("rows", [1, 5, 37])
def test_arm_linears_give_what_the_reference_gives(arm: Arm, rows: int) -> None:
    shape = (112, 98)
    x, storage, bias, layout, _ = packed_linear(rows, shape, bias=True, dtype=torch.bfloat16)
    got = torch.frombuffer(arm("linear", [rows, *shape], x, storage, bias), dtype=torch.bfloat16)
    wanted = linear.reference(x.double(), storage.double(), bias.double(), layout, shape)
    torch.testing.assert_close(got.view(rows, -1).double(), wanted, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_arm_attention_gives_what_the_reference_gives(arm: Arm, dtype: torch.dtype) -> None:
    q, k, v, starts, context, tables, scale = attention(
        [(5, 37), (1, 200), (40, 40)], heads=6, dtype=dtype
    )
    _, heads, dim = q.shape
    _, kv_heads, block, _ = k.shape
    integers = [heads * dim, dim, kv_heads * block * dim, block * dim, 3, heads, kv_heads, dim]
    integers += [block, tables.shape[1], dtype == torch.bfloat16, q.nbytes]
    out = arm("paged_attention", integers, q, k, v, starts, context, tables, torch.tensor([scale]))
    got = torch.frombuffer(out, dtype=dtype).view(q.shape)
    wanted = paged_attention.reference(q, k, v, starts, context, tables, scale)
    relative, absolute = (2**-7, 2e-3) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(got, wanted, rtol=relative, atol=absolute)


def _sources() -> list[str]:
    return sorted(str(path) for path in SOURCES.glob("*.c"))
