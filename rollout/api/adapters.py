"""LoRA adapters by name, merged into the live weights when they are loaded (``max_adapters`` 0).

Loading one makes ``checkpoint + adapter`` the next version, a transaction like any update; the one
before it is no longer in the weights. So every name that is loaded is answered by what is live, and
each token tells its version. ``weight_sync/versions/adapter_files.py`` is about adapters beside the
weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rollout.config import EngineConfig
from rollout.errors import ConfigError, InvalidRequest, VersionConflict
from rollout.loader import open_checkpoint, resolve_model
from rollout.loader.peft_adapter import PeftAdapter
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.weight_report import CheckLink, check_weights
from rollout.weight_sync.versions.adapter_files import check_name
from rollout.weight_sync.versions.directories import looks
from rollout.weights import Box
from rollout.weights.adapters import BIASED, EXPERTS
from rollout.weights.components import POLICY, component_of
from rollout.weights.names import placed

MAX_NAMES = 1024


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was merged, and what its files looked like before they were read."""

    name: str
    path: Path
    looks: object


class AdapterLink(WeightLink, CheckLink, Protocol):
    """What is asked of the engine: updates, and digests of what is live."""


class MergedAdapters:
    """The adapters of one engine; thread-safe, one load at a time.

    ``names`` are those that requests may name as their model.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}
        self._live: _Loaded | None = None
        self._version: int | None = None  # of the last commit here
        self._touched: frozenset[str] = frozenset()  # what it changed of the checkpoint
        # digest of all that was live -> the adapter's name and the same; a rollback brings it back
        self._made: dict[int, tuple[str | None, frozenset[str]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def load(
        self, name: str, where: Path, link: AdapterLink, *, inplace: bool = False
    ) -> UpdateReceipt | None:
        """Make checkpoint + adapter live; None where this one is already. Blocks.

        ``where``: who calls has seen to it that it may be read (``adapter_directory``).
        ``inplace``: read it again even if its files look as they did when they were read.
        Raises ``ConfigError`` for what cannot be read, ``VersionConflict`` where the live weights
        are not the checkpoint's, and what an update raises; then nothing has changed.
        """
        check_name(name)
        with self._lock:
            asked, info = _Loaded(name, where, looks(where)), link.info()
            still = info.state == "idle" and info.version == self._version
            if still and not inplace and asked == self._live:
                return None  # asked again: it was done
            if name not in self._names and len(self._names) >= MAX_NAMES:
                raise InvalidRequest(f"{MAX_NAMES} adapters are loaded: unload some")
            return self._commit(PeftAdapter.read(where), link, info, asked)

    def unload(self, name: str, link: AdapterLink) -> bool:
        """Forget the name; whether it was there. Of the live one the weights are the checkpoint's
        again; where others have taken its place since, those stay.
        """
        with self._lock:
            if name not in self._names:
                return False
            info = link.info()
            if info.state != "broken" and self._live_name(link, info) == name:
                self._commit(None, link, info, None)
            if self._live is not None and name == self._live.name:
                self._live = None
            del self._names[name]
            return True

    def _live_name(self, link: AdapterLink, info: WeightInfo) -> str | None:
        """The adapter that is in the live weights; after a rollback their digests tell."""
        if info.version == self._version:
            return None if self._live is None else self._live.name
        made = self._made.get(self._digest(link))
        return None if made is None else made[0]

    def _digest(self, link: AdapterLink) -> int:
        """Of all that is live."""
        return total(link.digests(self._config.timeout).values())

    def _commit(
        self,
        adapter: PeftAdapter | None,
        link: AdapterLink,
        info: WeightInfo,
        loaded: _Loaded | None,
    ) -> UpdateReceipt:
        """Upon what ``info`` says is live, or not at all."""
        changed = self._changed(link, info)
        if changed is None:
            model = self._config.model
            raise VersionConflict(
                f"version {info.version} did not come from the checkpoint and an adapter, so an "
                f"adapter cannot be merged into it; make the checkpoint live again, by a full "
                f"update from {model} (update_weights({model!r})), or go on with full updates"
            )
        known = info.wanted
        prefixes = known.adapter_prefixes
        adapter = None if adapter is None else adapter.placed(prefixes)
        modules = {} if adapter is None else adapter.spec.modules
        for name, of in sorted(modules.items()):
            if of.kind in (EXPERTS, BIASED):
                more = " and lora_experts=True" if of.kind == EXPERTS else ""
                raise ConfigError(
                    f"the adapter changes {name}, of kind {of.kind}, which is not merged here: "
                    f"start the engine with max_adapters={more}, or send the trainer's PEFT model"
                )
        own = frozenset(f"{module}.weight" for module in modules)
        wanted = changed | own
        if unknown := sorted(wanted - known.tensors.keys()):
            raise ConfigError(f"the adapter changes {unknown[0]}, which is no weight of this model")
        # The number is refused once anything else has committed: it would be merged into that.
        version, timeout = info.version + 1, self._config.timeout
        label = None if loaded is None else loaded.name
        options = UpdateOptions(partial=True, version=version, label=label, timeout=timeout)
        items = self._merged(wanted, adapter, prefixes)
        receipt = publish(items, connect=lambda: link, options=options)
        self._live, self._touched, self._version = loaded, own, receipt.version
        if loaded is not None:
            self._names[loaded.name] = None
        self._remember(link)
        return receipt

    def _changed(self, link: AdapterLink, info: WeightInfo) -> frozenset[str] | None:
        """The tensors in which what is live differs from the checkpoint, by what was merged here;
        None where it is something else. After a rollback, or an update with the checkpoint, the
        digests tell.
        """
        if info.version == self._version or info.state == "broken":
            return self._touched
        if info.version == 0:
            self._live, self._version, self._touched = None, 0, frozenset()
            self._remember(link)
            return self._touched
        made = self._made.get(self._digest(link))
        if made is not None:
            return made[1]
        config = self._config
        checkpoint = str(resolve_model(config.model, config.revision, config.load_format))
        report = check_weights(checkpoint, connect=lambda: link, timeout=config.timeout)
        problems = [*report.differing, *report.problems]  # of the policy: its head may be another
        return None if any(component_of(one) == POLICY for one in problems) else frozenset()

    def _remember(self, link: AdapterLink) -> None:
        digest = self._digest(link)
        if link.info().version == self._version:  # nothing else has committed meanwhile
            self._made[digest] = None if self._live is None else self._live.name, self._touched

    def _merged(
        self, wanted: frozenset[str], adapter: PeftAdapter | None, prefixes: Mapping[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors that this adapter or the one before it changes."""
        config, left = self._config, set(wanted)
        with open_checkpoint(config.model, config.revision, config.load_format) as checkpoint:
            for raw, lazy in checkpoint.items():
                if (name := placed(raw, prefixes)) in left:
                    left.remove(name)
                    weight = lazy.read(Box.full(lazy.shape))
                    yield name, weight if adapter is None else adapter.merged(name, weight)
        if left:
            raise ConfigError(
                f"{config.model} has no tensor {min(left)}, which the adapter changes: start the "
                "engine with max_adapters=, or send the trainer's PEFT model"
            )
