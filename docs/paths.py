"""Print the files that a prompt, or an update over gRPC, enters in order, and whether calls go up.

    python docs/paths.py prompt CHECKPOINT
    python docs/paths.py update CHECKPOINT

The counts in architecture.md. One greedy `generate` of two tokens, or one `update_weights` of the
checkpoint's own tensors by a client, after a first one that warms up; the engine's one rank lies in
this process. A call goes up where a file calls one that stands above it in the import order; one
that was handed down (a callback, a generator, what a thread runs) goes the way that it came.
"""

from __future__ import annotations

import sys
import threading
import tomllib
from pathlib import Path
from types import FrameType

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # what it tells of lies beside it

import rollout

PACKAGE = Path(rollout.__file__).parent
CONTRACTS = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
ORDERS = [one["layers"] for one in CONTRACTS["contracts"] if one["type"] == "layers"]


class Walk:
    """``entered``: how often, by file; ``ups``: (caller, called), the first function of each."""

    def __init__(self) -> None:
        self.entered: dict[str, int] = {}
        self.ups: dict[tuple[str, str], str] = {}

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        name = module(frame)
        if event != "call" or name is None:
            return
        self.entered[name] = self.entered.get(name, 0) + 1
        back = frame.f_back
        while back is not None and module(back) is None:
            back = back.f_back
        caller = None if back is None else module(back)
        if caller is not None and any(height(caller, o) < height(name, o) for o in ORDERS):
            self.ups.setdefault((caller, name), frame.f_code.co_name)


def module(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    inside = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(inside.parts).removesuffix(".__init__")


def height(name: str, order: list[str]) -> float:
    """Of a module in an import order, highest first; what is in none is as high as anything."""
    for row, modules in enumerate(order):
        if any(f"{name}.".startswith(f"{module.strip()}.") for module in modules.split("|")):
            return -row
    return float("nan")


def main(what: str, checkpoint: str) -> None:
    walk = Walk()
    threading.setprofile(walk.note)
    params = rollout.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    weights = [named for file in files for named in load_file(file).items()]
    with (
        rollout.Rollout(checkpoint, device="cpu", num_threads=1) as engine,
        rollout.Rollout.connect(engine.address) as client,
    ):
        for _ in range(2):
            walk.entered.clear()
            walk.ups.clear()
            sys.setprofile(walk.note)
            if what == "prompt":
                engine.generate([[4, 5, 6]], params)
            else:
                client.update_weights(weights, transport="grpc_stream", encoding="full")
            sys.setprofile(None)
        threading.setprofile(None)
        entered, ups = dict(walk.entered), dict(walk.ups)
    for name, count in entered.items():
        print(f"{count:6}  {name}")
    print(f"{len(entered)} files")
    for (caller, name), function in ups.items():
        print(f"up: {caller} -> {name}.{function}")


if __name__ == "__main__":
    main(*sys.argv[1:])
