"""Compiling the C sources beside this file: for a wheel, else at first use for this very machine.

A wheel holds one library for each of ``LEVELS`` of x86-64; the best that this CPU runs is loaded.
Without one (a checkout, another architecture) the sources are compiled once per compiler and CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_HERE = Path(__file__).parent
# Which products a compiler fuses into sums is its own: ``fused`` in vec.h says it instead.
_FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
)
_OPENMP = "-fopenmp"
_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")  # int8 came to CPUs first

#: what a wheel is compiled for, best first: name, the compiler's flags, what the CPU must have
LEVELS = (
    (
        "amx",
        (*_BF16, "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
    ),
    ("avx512-bf16", _BF16, _V4 | {"avx512_bf16", "avx512_vnni"}),
    ("avx512", ("-march=x86-64-v4",), _V4),
    ("avx2", ("-march=x86-64-v3",), _V3),
)


class BuildError(Exception):
    """No library; the message says why in one line."""


def load() -> tuple[ctypes.CDLL, str]:
    """The compiled library and how it was made; raises ``BuildError``.

    A library that is installed or in the cache is only loaded. Several processes may come at once:
    each builds in a folder of its own and moves the result into place atomically.
    """
    if (installed := _installed()) is not None:
        return installed
    compiler, cache, target = _environment()
    failure = "no OpenMP runtime"
    for openmp in (_share_openmp(), False):
        path = cache / f"kernels-{_key(compiler, openmp, target)}.so"
        try:
            if path.exists():
                return ctypes.CDLL(str(path)), f"{path} ({_threading(openmp)})"
            return _build_and_load(compiler, openmp, target, path)
        except (BuildError, OSError) as error:
            failure = str(error)
        if not openmp:
            break
    raise BuildError(failure)


def build_levels(folder: Path) -> list[Path]:
    """Libraries for all ``LEVELS`` that the compiler here knows, in ``folder``; none elsewhere."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return []
    compiler, _, _ = _environment()

    def build(level: tuple[str, tuple[str, ...], frozenset[str]]) -> Path | None:
        name, flags, _ = level
        with tempfile.TemporaryDirectory(prefix="rollout-kernels-") as scratch:
            try:
                built = _compile(compiler, True, flags, Path(scratch))
            except BuildError:
                return None  # a compiler older than these instructions
            return Path(shutil.copy(built, folder / f"{name}.so"))

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [path for path in pool.map(build, LEVELS) if path is not None]


def _installed() -> tuple[ctypes.CDLL, str] | None:
    """The best library that came with the package for this CPU, unless a target is asked for."""
    if os.environ.get("ROLLOUT_KERNELS_TARGET") or not (_HERE / "built").is_dir():
        return None
    has = {word for line in _cpu().splitlines() for word in line.split()}
    for name, _, needs in LEVELS:
        path = _HERE / "built" / f"{name}.so"
        if needs <= has and path.exists() and _share_openmp():
            return ctypes.CDLL(str(path)), f"{path} (OpenMP)"
    return None


def _threading(openmp: bool) -> str:
    return "OpenMP" if openmp else "one thread"


def _environment() -> tuple[str, Path, str]:
    """C compiler, cache folder and target: the only place here that reads the environment.

    ``CC`` and ``XDG_CACHE_HOME`` as everywhere. ``ROLLOUT_KERNELS_TARGET``: a CPU type that the
    compiler knows (haswell, skylake-avx512, neoverse-n1) to build for instead of this machine's,
    which must have its instructions.
    """
    wanted = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, [wanted] if wanted else ["gcc", "cc"])), None)
    if compiler is None:
        raise BuildError(f"no C compiler: {wanted or 'gcc or cc'} is not on PATH")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    flag = "-mcpu" if platform.machine() in ("aarch64", "arm64") else "-march"
    target = os.environ.get("ROLLOUT_KERNELS_TARGET") or "native"
    return compiler, Path(cache) / "rollout", f"{flag}={target}"


def _share_openmp() -> bool:
    """Make torch's OpenMP runtime visible to our library, which is linked against none.

    Two runtimes in one process would keep two pools of threads that spin against each other.
    """
    if platform.system() != "Linux":
        return False
    import torch  # not there while a wheel is built

    root = Path(torch.__file__).parent
    bundled = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    for candidate in [*map(str, bundled), "libgomp.so.1"]:
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


def _key(compiler: str, openmp: bool, target: str) -> str:
    """Names everything the machine code depends on; another CPU type gets another library."""
    parts = [compiler, _version(compiler), *_FLAGS, target, str(openmp), _cpu()]
    for source in sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")]):
        parts += [source.name, source.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _version(compiler: str) -> str:
    """Stands for the compiler's version without running it, which would cost more than loading."""
    stat = Path(compiler).resolve().stat()
    return f"{Path(compiler).resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted(_cpu_lines(info.read_text())))


def _cpu_lines(text: str) -> Iterator[str]:
    wanted = ("model name", "flags", "Features", "CPU part")
    first_core = text.split("\n\n", 1)[0]
    return (line for line in first_core.splitlines() if line.startswith(wanted))


def _build_and_load(
    compiler: str, openmp: bool, target: str, path: Path
) -> tuple[ctypes.CDLL, str]:
    with tempfile.TemporaryDirectory(prefix="rollout-kernels-") as folder:
        built = _compile(compiler, openmp, (target,), Path(folder))
        try:
            _install(built, path)
        except OSError:  # a read-only home: use it from here, where it stays mapped
            return ctypes.CDLL(str(built)), f"built without a cache ({_threading(openmp)})"
    return ctypes.CDLL(str(path)), f"{path} ({_threading(openmp)})"


def _compile(compiler: str, openmp: bool, target: tuple[str, ...], folder: Path) -> Path:
    """Objects first: linking with ``-fopenmp`` would bind a runtime of the compiler's own."""
    sources = [str(p) for p in sorted(_HERE.glob("*.c"))]
    flags = [*_FLAGS, *target, *([_OPENMP] if openmp else [])]
    _run([compiler, "-c", *flags, *sources], folder)
    objects = sorted(p.name for p in folder.glob("*.o"))
    _run([compiler, "-shared", "-o", "kernels.so", *objects, "-lm"], folder)
    return folder / "kernels.so"


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within 120 s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise BuildError(f"{command[0]} failed: {lines[0].strip()}")


def _install(built: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(built.read_bytes())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
