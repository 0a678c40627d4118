"""A policy learns to add: GRPO where the trainer's own processes are the engine's ranks.

    python trainer_examples/grpo_colocated.py [--ranks 1|2] [--steps N] [--output DIR]

No service: every rank trains with FSDP2 and is a tensor-parallel rank of one engine. All ranks make
the same calls. While the trainer learns the engine sleeps, its weights and KV cache given back; an
update brings the weights, from shard to shard, and then the cache wakes.

Exit status 0: the reward at least doubled (or reached 0.9 from a --start that is too good for that)
and is above 0.8, the version moved once a step, and trainer and rollout agreed on the logprob of
every sampled token to 1e-4. Else 1, and each goal that was missed is named.
"""

from __future__ import annotations

import random
import sys

from addition_task import problems
from answering import answers
from driver import example
from grpo import Sample
from trainer_rank import Trainer

from rollout import ColocatedRollout, Rollout, UpdateReceipt


class Colocated(Trainer):
    """A rank of the trainer and of the engine."""

    def connect(self) -> ColocatedRollout:
        return Rollout.from_ranks(
            self.settings.checkpoint,
            device="cpu",
            dtype="float32",
            num_threads=1,
            max_num_seqs=512,
            kv_cache_bytes=128 << 20,
            deterministic=self.settings.deterministic,
        )

    def sample(self, number: int) -> tuple[list[Sample], int]:
        """All ranks ask for all samples, and each learns from its share."""
        s = self.settings
        drawn = problems(s.prompts, random.Random(f"{s.seed}-{number}"))
        seeds = [(s.seed * 100_000 + number) * 1000 + index for index in range(s.prompts)]
        found = answers(self.rollout, drawn, s.samples, seeds)
        groups = [found[first : first + s.samples] for first in range(0, len(found), s.samples)]
        share = [sample for group in groups[s.rank :: s.ranks] for sample in group]
        return share, share[0].versions[0]

    def learn(self, samples: list[Sample], number: int) -> float:
        self.rollout.sleep(level=2)
        return super().learn(samples, number)

    def push(self) -> UpdateReceipt:
        self.rollout.wake_up(["weights"])
        receipt = super().push()
        self.rollout.wake_up(["kv_cache"])
        return receipt

    def holds(self, checkpoint: str) -> bool:
        return self.rollout.check_weights(checkpoint).equal


if __name__ == "__main__":
    sys.exit(example(__file__, __doc__ or "", Colocated, service=False))
