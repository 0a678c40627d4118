"""What the ranks of a source of one's own agree through: see docs/weight_sync.md."""

from rollout.weight_sync.trainer.rank_group import RankGroup as Agreement

__all__ = ["Agreement"]
