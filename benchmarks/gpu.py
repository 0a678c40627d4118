"""Checks and times the GPU engine in one call of under nine minutes; writes JSON and a table.

    python benchmarks/gpu.py [--out DIRECTORY] [--only SECTION,...] [--seconds 530] [--dry-run]

Every section runs by itself: what fails prints its error, and the next one goes on. A section that
has used up its seconds is cut where it looks at its clock; one with less than half of them left is
left out and says so; one that hangs ends the run in the end, and shows where. Rates stand beside
the copy bandwidth and the matrix product's rate measured in the same run. ``--dry-run`` goes the
same ways with tiny shapes on a CPU, Triton's kernels in its interpreter: its figures mean nothing.
Needs torch, triton, transformers, grpcio and safetensors; "streams" what ``rollout serve`` needs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

GRACE = 10.0  # seconds behind those "for everything", after which it ends by force


@dataclass
class Row:
    """One figure; ``bound`` names what ``fraction`` is a fraction of."""

    section: str
    name: str
    value: float
    unit: str
    fraction: float | None = None
    bound: str = ""


@dataclass
class Report:
    """What came of it all; ``copy`` bytes and ``matmul`` operations a second, once measured."""

    dry: bool
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    copy: float = float("nan")
    matmul: float = float("nan")
    section: str = ""
    deadline: float = float("inf")
    file: Path | None = None  # the results', without its ending

    def add(self, name: str, value: float, unit: str, bound: str = "", of: float = 0.0) -> None:
        """``of``: the bound in the same unit."""
        self.rows.append(Row(self.section, name, value, unit, value / of if of else None, bound))
        share = f"  {value / of:.2f} of {bound}" if of else ""
        print(f"{self.section:10} {name:52} {value:12.4g} {unit}{share}", flush=True)
        self.write()

    def write(self) -> None:
        """After every figure: a run that is killed, or whose device is lost, leaves what it has."""
        if self.file is not None:
            kept = {k: v for k, v in vars(self).items() if k not in ("deadline", "file")}
            kept["rows"] = [asdict(row) for row in self.rows]
            self.file.with_suffix(".json").write_text(json.dumps(kept, indent=1))
            self.file.with_suffix(".md").write_text(self.markdown())

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def markdown(self) -> str:
        lines = ["| section | what | value | unit | fraction | of |", "|---|---|---|---|---|---|"]
        for row in self.rows:
            share = "" if row.fraction is None else f"{row.fraction:.2f}"
            lines.append(
                f"| {row.section} | {row.name} | {row.value:.4g} | {row.unit} | {share} "
                f"| {row.bound} |"
            )
        lines += [f"\n{name}: **failed**: {why}" for name, why in self.errors.items()]
        return "\n".join(lines) + "\n"


def main(title: str, module: str, name: str) -> int:
    """The command line of ``SECTIONS`` of ``module``; its results are files called ``name``."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--out", type=Path, default=Path(f"{name}-results"))
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--seconds", type=float, default=530.0, help="for everything")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args()
    if args.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    try:
        import torch

        sections = importlib.import_module(module).SECTIONS
    except ImportError as error:
        root = Path(__file__).parents[1]
        print(f"{error}; what is needed comes with: pip install -e {root}", file=sys.stderr)
        return 2
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device here; --dry-run goes the same ways on a CPU", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(args.seconds + GRACE, exit=True)
    report, ends = Report(args.dry_run, file=args.out / name), time.monotonic() + args.seconds
    wanted = [each for each in args.only.split(",") if each] or [each for each, _, _ in sections]
    for name, budget, run in sections:
        if name not in wanted:
            continue
        left = ends - time.monotonic()
        if left < budget / 2:
            report.errors[name] = "left out: no time"
            continue
        _run(report, name, min(budget, left), run)
    report.write()
    print(report.markdown())
    return 1 if report.errors else 0


def _run(report: Report, name: str, seconds: float, run: Any) -> None:
    import torch

    report.section, started = name, time.monotonic()
    report.deadline = started + seconds
    try:
        run(report)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one section's failure is no other's
        traceback.print_exc()
        report.errors[name] = f"{type(error).__name__}: {error}"[:2000]
    report.seconds[name] = time.monotonic() - started
    report.write()
    gc.collect()  # engines and graphs that refer to each other
    try:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except RuntimeError as error:  # the device was lost, which the next sections will say
        print(f"after {name}: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], "gpu_sections", "gpu"))
