"""The versions of ``constraints.txt`` go together on a machine with a GPU, too."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

PINS = Path(__file__).parents[2] / "constraints.txt"
# torch's builds for CUDA ask for one release of Triton, those for a CPU for none.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def pins() -> dict[str, str]:
    lines = (line.partition("#")[0] for line in PINS.read_text().splitlines())
    return dict(line.strip().split("==") for line in lines if line.strip())


def test_triton_is_the_release_that_torch_asks_for_with_cuda() -> None:
    """Another one leaves pip without a solution where PyTorch's CPU index is not named."""
    pinned = pins()
    assert pinned["triton"] == TRITON_OF_TORCH[pinned["torch"]]
    for text in requires("torch") or ():
        wanted = Requirement(text)
        if wanted.name == "triton" and (wanted.marker is None or wanted.marker.evaluate()):
            assert wanted.specifier.contains(pinned["triton"])
