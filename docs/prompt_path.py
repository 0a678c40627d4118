"""Print the files that one prompt enters, in order: the count in architecture.md, "A prompt".

    python docs/prompt_path.py CHECKPOINT

One greedy `generate` of two tokens, by an engine with one rank in this process, after a first one
that warms up.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import rollout

PACKAGE = Path(rollout.__file__).parent


def main(checkpoint: str) -> None:
    entered: dict[str, int] = {}

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            name = str(path.relative_to(PACKAGE))
            entered[name] = entered.get(name, 0) + 1

    params = rollout.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    threading.setprofile(note)
    with rollout.Rollout(checkpoint, device="cpu", num_threads=1) as engine:
        engine.generate([[1, 2, 3]], params)
        entered.clear()
        sys.setprofile(note)
        engine.generate([[4, 5, 6]], params)
        sys.setprofile(None)
        threading.setprofile(None)
        found = list(entered)
    for name in found:
        print(f"{entered[name]:6}  {name}")
    print(f"{len(found)} files")


if __name__ == "__main__":
    main(sys.argv[1])
