"""``rollout.testing.faults`` under the name it was first documented by."""

from rollout.testing.faults import Fault, Faulty, FaultyLink

__all__ = ["Fault", "Faulty", "FaultyLink"]
