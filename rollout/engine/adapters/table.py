"""Which adapters are served, and in which slots of the ranks they lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rollout.errors import ConfigError, InvalidRequest, VersionConflict
from rollout.weights.adapters import AdapterVersion


class AdapterTable:
    """Names and their newest versions; a sequence that has begun keeps the slot it began with.

    A slot is free where no newest version lies in it, nobody has reserved it, ``before`` has it
    not, and no live sequence needs it, which ``in_use()`` says. ``names``, ``versions``, ``newest``
    and ``before`` may be read in any thread; all else is the engine thread's.

    ``before``: what the names of the last commit meant before it (None: nothing), for a rollback;
    None if that is gone.
    """

    def __init__(
        self, slots: int, in_use: Callable[[], Collection[int]], setting: str = "max_adapters"
    ) -> None:
        """``setting``: what says how many slots there are."""
        self.slots, self.setting = slots, setting
        self.before: dict[str, AdapterVersion | None] | None = {}
        self._in_use = in_use
        self._newest: dict[str, AdapterVersion] = {}
        self._last: dict[str, int] = {}  # the last number of a name, also of one that was removed
        self._reserved: set[int] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._newest)

    @property
    def versions(self) -> dict[str, int]:
        """The newest version of each name."""
        return {name: version.version for name, version in list(self._newest.items())}

    def newest(self, name: str) -> AdapterVersion | None:
        return self._newest.get(name)

    def resolve(self, name: str) -> AdapterVersion:
        """What a request gets that names an adapter; ``InvalidRequest`` for one that is unknown."""
        if not self.slots:
            raise InvalidRequest(
                f"adapter {name!r:.300}: this engine serves none by themselves; start it with "
                "max_adapters"
            )
        found = self._newest.get(name)
        if found is None:
            known = ", ".join(self._newest) or "none"
            hint = "; ask by the name alone, which is its newest version" if "@" in name else ""
            raise InvalidRequest(f"there is no adapter {name!r:.300}; loaded: {known:.1000}{hint}")
        return found

    @property
    def kept(self) -> set[int]:
        """The slots of ``before``."""
        return {version.slot for version in (self.before or {}).values() if version is not None}

    def reserve(self) -> int:
        """A free slot, which no version is in until ``commit``, or until ``release``."""
        taken = self._reserved | self.kept | {each.slot for each in self._newest.values()}
        taken |= set(self._in_use())
        slot = next((slot for slot in range(self.slots) if slot not in taken), None)
        if slot is None:
            names = ", ".join(map(str, self._newest.values()))
            raise ConfigError(
                f"all {self.slots} adapter slots are taken ({names:.1000}, and versions that "
                "requests still use): unload one, wait, or start the engine with more "
                f"{self.setting}"
            )
        self._reserved.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give up a reserved slot."""
        self._reserved.discard(slot)

    def commit(
        self, name: str, slot: int, version: int | None = None, *, again: bool = False
    ) -> AdapterVersion:
        """What lies in a reserved slot is the newest of ``name``, under the next number of it or
        ``version``: a later one, unless it is the same version ``again``.
        """
        last = self._last.get(name, 0)
        if version is not None and version <= last and not again:
            raise VersionConflict(f"adapter {name!r}: version {version} is not above {last}")
        number = last + 1 if version is None else version
        self._last[name] = max(last, number)
        self._reserved.discard(slot)
        made = AdapterVersion(name=name, version=number, slot=slot)
        self._newest[name] = made
        return made

    def restore(self, name: str, version: AdapterVersion | None) -> None:
        """What ``name`` was before: an earlier version, whose slot was kept, or nothing."""
        if version is None:
            self._newest.pop(name, None)
        else:
            self._newest[name] = version

    def remove(self, name: str) -> AdapterVersion | None:
        """Forget a name, also what a rollback would make of it; what runs goes on with it."""
        if self.before is not None:
            self.before.pop(name, None)
        return self._newest.pop(name, None)

    def books(self) -> AdapterBooks:
        """All that is written here, to be ``reset`` to."""
        return AdapterBooks(
            newest=dict(self._newest),
            last=dict(self._last),
            reserved=frozenset(self._reserved),
            before=None if self.before is None else dict(self.before),
        )

    def reset(self, books: AdapterBooks) -> None:
        self._newest, self._last = dict(books.newest), dict(books.last)
        self._reserved = set(books.reserved)
        self.before = None if books.before is None else dict(books.before)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBooks:
    """What an ``AdapterTable`` said at one moment."""

    newest: Mapping[str, AdapterVersion]
    last: Mapping[str, int]
    reserved: frozenset[int]
    before: Mapping[str, AdapterVersion | None] | None
