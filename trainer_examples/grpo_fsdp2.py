"""A policy learns to add: GRPO with FSDP2 trainers and a tensor-parallel rollout service.

    python trainer_examples/grpo_fsdp2.py [--steps N] [--output DIR]

Makes a small Qwen3, warms it up by a short supervised phase, starts `rollout serve` with two
tensor-parallel ranks, and trains with two FSDP2 ranks that sample from the service and push their
weights back after every step. "reward" is the fraction of samples that are exactly right; the
first and the last are of 1024 samples on held-out problems, before and after training.

Exit status 0: the reward at least doubled (or reached 0.9 from a --start that is too good for that)
and is above 0.8, the version moved once a step, and trainer and rollout agreed on the logprob of
every sampled token to 1e-4. Else 1, and each goal that was missed is named.
"""

from __future__ import annotations

import sys

from driver import example
from trainer_rank import Trainer

if __name__ == "__main__":
    sys.exit(example(__file__, __doc__ or "", Trainer))
