"""LoRA adapters by name, merged into the live weights when they are loaded.

Until adapters are served by themselves, loading one makes ``checkpoint + adapter`` the next
version, a transaction like any update; the one before it is no longer in the weights. So every
name that is loaded is answered by what is live, and each token tells its version.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rollout.config import EngineConfig
from rollout.errors import ConfigError, InvalidRequest, VersionConflict
from rollout.loader import open_checkpoint, resolve_model
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import UpdateReceipt, WeightInfo
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.weight_report import CheckLink, check_weights
from rollout.weight_sync.versions.follower import allowed, check_inside, looks
from rollout.weights import Box
from rollout.weights.files import open_weights

MAX_NAMES = 1024
MAX_RANK = 1024
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# What changes the arithmetic, and is not done here: such an adapter is refused by the setting.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    # What starts otherwise (PiSSA, OLoRA, CorDA, LoftQ ...) has changed the weights it is added to.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """A PEFT adapter directory: ``A`` [rank, in] and ``B`` [out, rank] by weight, and the scale."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float

    @classmethod
    def read(cls, path: Path) -> LoraFiles:
        """Raises ``ConfigError`` naming what is missing or not supported."""
        try:
            settings = json.loads((path / "adapter_config.json").read_text())
            rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} holds no PEFT adapter_config.json: {error}") from error
        if settings.get("peft_type") != "LORA" or not 1 <= rank <= MAX_RANK:
            raise ConfigError(f"{path} is no LoRA adapter of rank 1 to {MAX_RANK}")
        for name, plain in _PLAIN.items():
            if settings.get(name) not in plain:
                raise ConfigError(
                    f"{path} has {name}={settings[name]!r:.80}, which is not merged here; send "
                    "the trainer's PEFT model by update_weights"
                )
        _, files = open_weights(path, "safetensors", mapped=False)
        with closing(files):
            metas = files.metadata().values()
            found = {meta.name: files.read(meta.name, Box.full(meta.shape)) for meta in metas}
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        return cls(_pairs(found, path), scale)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """By PEFT's own arithmetic: the same bits as its ``merge()`` for float32 factors."""
        if name not in self.factors:
            return weight
        down, up = self.factors[name]
        delta = (up.float() @ down.float()) * self.scaling
        return weight + delta.to(weight.dtype)


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

    ``names`` are those that requests may name as their model. Reads under ``weight_dirs`` alone.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}
        self._live: _Loaded | None = None
        self._version: int | None = None  # of the last commit here
        self._touched: frozenset[str] = frozenset()  # what it changed of the checkpoint
        self._made: dict[int, frozenset[str]] = {}  # digest of all that was live -> the same

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def load(
        self, name: str, path: str, link: AdapterLink, *, inplace: bool = False
    ) -> UpdateReceipt | None:
        """Make checkpoint + adapter live; None where this one is already. Blocks.

        ``inplace``: read it again even if its files look as they did when they were read.
        Raises ``ConfigError`` for what cannot be read, ``VersionConflict`` where the live weights
        are not the checkpoint's, and what an update raises; then nothing has changed.
        """
        if not name or len(name) > 256 or "\0" in path:
            raise InvalidRequest("lora_name must have 1 to 256 characters, and lora_path no null")
        where = allowed(path, self._config.weight_dirs)
        check_inside(where, self._config.weight_dirs)
        with self._lock:
            asked, info = _Loaded(name, where, looks(where)), link.info()
            still = info.state == "idle" and info.version == self._version
            if still and not inplace and asked == self._live:
                return None  # asked again: it was done
            if name not in self._names and len(self._names) >= MAX_NAMES:
                raise InvalidRequest(f"{MAX_NAMES} adapters are loaded: unload some")
            receipt = self._commit(LoraFiles.read(where), link, info, label=name)
            self._names[name], self._live = None, asked
            return receipt

    def unload(self, name: str, link: AdapterLink) -> bool:
        """Forget the name; whether it was there. Of the live one the weights are the checkpoint's
        again; where others have taken its place since, those stay.
        """
        with self._lock:
            if name not in self._names:
                return False
            if self._live is not None and name == self._live.name:
                info = link.info()
                if info.version == self._version and info.state != "broken":
                    self._commit(LoraFiles({}, 0.0), link, info, label=None)
                self._live = None
            del self._names[name]
            return True

    def _commit(
        self, files: LoraFiles, link: AdapterLink, info: WeightInfo, label: str | None
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
        wanted = changed | files.factors.keys()
        known = {meta.name for meta in info.tensors}
        if unknown := sorted(wanted - known):
            raise ConfigError(f"the adapter changes {unknown[0]}, which is no weight of this model")
        # The number is refused once anything else has committed: it would be merged into that.
        version, timeout = info.version + 1, self._config.timeout
        options = UpdateOptions(partial=True, version=version, label=label, timeout=timeout)
        items = self._merged(wanted, files)
        receipt = publish(items, connect=lambda: link, options=options)
        if self._touched != files.factors.keys():  # most have the names of the one before
            self._touched = frozenset(files.factors)
        self._version = receipt.version
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
            self._version, self._touched = 0, frozenset()
            self._remember(link)
            return self._touched
        known = self._made.get(total(link.digests(self._config.timeout).values()))
        if known is None:
            config = self._config
            checkpoint = str(resolve_model(config.model, config.revision, config.load_format))
            same = check_weights(checkpoint, connect=lambda: link, timeout=config.timeout).equal
            known = frozenset() if same else None
        return known

    def _remember(self, link: AdapterLink) -> None:
        digest = total(link.digests(self._config.timeout).values())
        if link.info().version == self._version:  # nothing else has committed meanwhile
            self._made[digest] = self._touched

    def _merged(self, wanted: frozenset[str], files: LoraFiles) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors that this adapter or the one before it changes."""
        config = self._config
        with open_checkpoint(config.model, config.revision, config.load_format) as checkpoint:
            for name, lazy in checkpoint.items():
                if name in wanted:
                    yield name, files.merged(name, lazy.read(Box.full(lazy.shape)))


def _pairs(found: Mapping[str, Tensor], path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = {}
    for key, down in found.items():
        if key.endswith(_A):
            stem = key.removesuffix(_A)
            up = found.get(stem + _B)
            if up is None or down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
                raise ConfigError(f"{path}: {key} has no {_B[1:]} that fits it")
            pairs[stem.removeprefix(_PREFIX) + ".weight"] = (down, up)
    other = sorted(key for key in found if not key.endswith((_A, _B)))
    if other or not pairs:
        raise ConfigError(f"{path} holds {other[0] if other else 'no factors'}: plain LoRA alone")
    return pairs
