"""The oldest weights that a client's requests may run on: reads follow its writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams


@dataclass(frozen=True, slots=True)
class ReadFloor:
    """``version`` (0: any) of ``epoch``, the life of the engine or fleet in which it counts (None:
    whichever there is). In another epoch such requests end with ``EngineRestarted``.
    """

    version: int = 0
    epoch: int | None = None

    @classmethod
    def of(cls, version: object) -> ReadFloor:
        """As a caller sets it."""
        if type(version) is not int or version < 0:
            raise InvalidRequest(
                f"min_version must be an integer of 0 or more, got {version!r:.80}"
            )
        return cls(version)

    def joined(self, other: ReadFloor) -> ReadFloor:
        """The higher one; of two epochs this one's, where it asks for anything."""
        if not self.version:
            return other
        comparable = other.version > self.version and other.epoch == self.epoch
        return other if comparable else self

    def under(self, params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """``params`` with it where they ask for no ``min_version`` themselves, nor for a group's
        version; what they ask for counts in the same epoch.
        """
        if not self.version:
            return list(params)
        made: dict[int, SamplingParams] = {}
        for one in params:
            if id(one) not in made:
                made[id(one)] = self._under(one)
        return [made[id(one)] for one in params]

    def _under(self, one: SamplingParams) -> SamplingParams:
        if one.min_version_epoch is not None:
            return one
        if one.min_version is None and one.group_id is None:
            return replace(one, min_version=self.version, min_version_epoch=self.epoch)
        return replace(one, min_version_epoch=self.epoch) if one.min_version else one
