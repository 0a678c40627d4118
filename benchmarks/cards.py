"""Checks and times several GPUs of one machine in one call of under nine minutes.

    python benchmarks/cards.py [--out DIRECTORY] [--only SECTION,...] [--seconds 530] [--dry-run]

Copies between cards, tensor parallelism at 1, 2, 4 ... cards and stages of a pipeline against one,
updates of an engine on one half of them from an FSDP2 trainer on the other (NCCL's broadcast and
point-to-point among them), and an engine inside a trainer's ranks on all. Writes JSON and a table,
as ``gpu.py`` does, for whoever has such a machine to send back. ``--dry-run`` goes the same ways
over gloo, with tiny shapes, on two ranks of a CPU. Needs torch, transformers, grpcio and
safetensors.
"""

from __future__ import annotations

import sys

from gpu import main

if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], "cards_sections", "cards"))
