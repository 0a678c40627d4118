"""Which weights computed which positions, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.generation import VersionSpan


@dataclass(slots=True, eq=False)
class SpanBuilder:
    """Contiguous spans of versions over positions ``0 <= i < length``; grows at its end only."""

    length: int = 0
    _starts: list[int] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    def extend(self, version: int, count: int) -> None:
        """The next ``count`` positions were computed by ``version``."""
        if count <= 0:
            return
        versions = self._versions
        if not versions or versions[-1] != version:
            self._starts.append(self.length)
            versions.append(version)
        self.length += count

    @property
    def oldest(self) -> int | None:
        """The lowest version; None where there are no positions."""
        return min(self._versions, default=None)

    def clear(self) -> None:
        self._starts.clear()
        self._versions.clear()
        self.length = 0

    def single_version(self) -> int | None:
        """The version of every position so far, or None when there are none or several."""
        return self._versions[0] if len(self._versions) == 1 else None

    def prefix(self, length: int) -> SpanBuilder:
        """A copy of the first ``length`` positions."""
        out = SpanBuilder()
        for span in self.spans():
            out.extend(span.version, min(span.stop, length) - span.start)
        return out

    def spans(self) -> tuple[VersionSpan, ...]:
        stops = [*self._starts[1:], self.length]
        return tuple(map(VersionSpan, self._versions, self._starts, stops))
