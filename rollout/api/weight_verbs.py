"""The verbs of weights: blocking, in the thread of the trainer's collectives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.api.backend import Backend
from rollout.config import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT, check_timeout
from rollout.errors import ConfigError
from rollout.spellings import VERBS, explains_arguments
from rollout.weight_sync.protocol.delta import DeltaBase
from rollout.weight_sync.protocol.messages import UpdateReceipt, WeightInfo
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.shard_layout import PlanCache
from rollout.weight_sync.trainer.sources.update import own_adapters
from rollout.weight_sync.trainer.weight_report import WeightReport
from rollout.weight_sync.trainer.weight_report import check_weights as check
from rollout.weight_sync.trainer.weight_report import preflight as preflight_source
from rollout.weights.adapters import AdapterLoaded
from rollout.weights.components import POLICY


@explains_arguments(VERBS, ConfigError)
class WeightVerbs:
    """One engine's weights, as a trainer sees them; ``timeout`` (seconds, at most a day) bounds
    every wait.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._delta_base, self._plans = DeltaBase(), PlanCache()

    def update_weights(
        self,
        source: Any = None,
        *,
        server_path: str | Path | None = None,
        update_id: str | None = None,
        version: int | None = None,
        transport: Any = "auto",
        encoding: str = "auto",
        staging: str = "auto",
        in_flight: str = "keep",
        pin_timeout: float | None = None,
        pin_fallback: str = "keep",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float = DEFAULT_TIMEOUT,
        label: str | None = None,
        partial: bool = False,
        anchor_every: int = 0,
        max_stall: float | None = None,
        max_extra_memory: int | None = None,
        adapters: Mapping[str, Any] | None = None,
        adapters_only: bool = False,
    ) -> UpdateReceipt:
        """Make ``source`` live as one new version, or change nothing and say why.

        ``source``: a module (plain, DDP, FSDP, ZeRO), an iterable of ``(name, tensor)``, a
        checkpoint directory or a ``WeightSource``. Collective over a distributed source: every
        rank calls it, and gets the same receipt or the same error. ``version`` may jump ahead.
        ``in_flight``: keep | recompute | abort | wait | pin for running requests; what is pinned
        finishes on the version before, for at most ``pin_timeout`` (None: ``timeout``), then
        ``pin_fallback``: keep | recompute | abort. ``partial``: what is not sent keeps its live
        value. ``server_path`` in place of a source: a checkpoint or version
        directory that the engine's own host reads, under one of its ``--weight-dir``;
        with an ``update_id`` a repeated call gets the first one's receipt while that is live.
        ``transport``: auto | inline | grpc_stream | broadcast | ipc | p2p, or a ``Transport``.
        ``encoding``: auto | full | delta | delta-zstd; a delta keeps a host copy of what it sent,
        and goes full by itself where the engine holds something else, and every ``anchor_every``
        updates. ``max_stall`` (seconds in which no step may run) and ``max_extra_memory`` (bytes
        that a rank may take on its device beside what it holds): an update that is going to
        break one is refused before anything moves, with what it would need (``LimitExceeded``).
        updates. ``adapters``: LoRA adapters by name (PEFT models, or directories that PEFT wrote)
        that go with the source, or without one: their factors alone, into slots of the engine
        (``max_adapters``), live at the same commit as ``name@version``. A source that is one of
        them goes unmerged; any other PEFT model is sent merged. ``adapters_only``: of ``source``,
        a PEFT model, its active adapters under their names there.
        The receipt's ``details`` say which of them was taken and why. Raises a
        ``WeightError`` (the old version serves on) or an ``EngineError``.
        """
        options = UpdateOptions(
            version=version,
            transport=transport,
            encoding=encoding,
            staging=staging,
            in_flight=in_flight,
            pin_timeout=pin_timeout,
            pin_fallback=pin_fallback,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            label=label,
            partial=partial,
            anchor_every=anchor_every,
            update_id=update_id,
            max_stall=max_stall,
            max_extra_memory=max_extra_memory,
        )
        if not isinstance(adapters_only, bool):
            raise ConfigError(
                f"adapters_only is True or False, got {adapters_only!r:.80}; to name an adapter: "
                "adapters={name: peft_model}"
            )
        if adapters_only:
            if adapters or server_path is not None:
                raise ConfigError("adapters_only=True takes a PEFT model as its source, alone")
            source, adapters = None, own_adapters(source)
        if (source is None and not adapters) == (server_path is None):
            raise ConfigError(
                "update_weights takes a source, adapters= or both; or server_path= alone"
            )
        if update_id is not None and server_path is None:
            raise ConfigError("update_id goes with server_path=: other updates get their own")
        if server_path is not None:
            options.to_server()
            return self._backend.update_from(str(server_path), options)
        receipt = publish(
            source,
            connect=lambda: self._backend.link,
            options=options,
            base=self._delta_base,
            plans=self._plans,
            adapters=adapters,
        )
        others = bool(receipt.components) and POLICY not in receipt.components
        builds_on_live = partial or source is None or others
        # Ranks that did not send learn it too.
        self._backend.committed(receipt, partial=builds_on_live)
        return receipt

    def weight_info(self) -> WeightInfo:
        """Which version is live, and what a full update must send."""
        return self._backend.info()

    def rollback(self, timeout: float = DEFAULT_TIMEOUT) -> UpdateReceipt:
        """The version before the last commit serves again, under a new number.

        Possible once, until the next update begins; else ``VersionConflict``.
        """
        return self._backend.rollback(check_timeout(timeout))

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        """Of the last commits (64 at most), oldest first, whoever sent them."""
        return self._backend.receipts()

    def check_weights(self, source: Any, *, timeout: float = DEFAULT_TIMEOUT) -> WeightReport:
        """Name the tensors of ``source`` that differ from the live ones; only digests travel."""
        return check(source, connect=lambda: self._backend, timeout=check_timeout(timeout))

    def preflight(self, source: Any, *, timeout: float = DEFAULT_TIMEOUT) -> WeightReport:
        """Whether ``source`` would fit, from names, shapes and dtypes alone, and what an update
        would take: ``report.cost`` has seconds and the peak of extra memory on both sides.
        """
        timeout = check_timeout(timeout)
        return preflight_source(source, connect=lambda: self._backend, timeout=timeout)

    def load_lora_adapter(
        self, name: str, path: str | Path, *, inplace: bool = False
    ) -> AdapterLoaded:
        """Have requests by ``name`` answered with the adapter of a PEFT directory. Blocks.

        With ``max_adapters`` it lies beside the weights, and requests name it
        (``SamplingParams(adapter=name)``); the next one of this name is another version, and who
        has begun goes on with the one before. Else it is merged into the weights. Files that look
        as when they were read are not read again, unless ``inplace``. ``ConfigError`` for what
        cannot be read or does not fit, ``WeightMismatch`` for the tensors of another base; then
        nothing has changed. Where the engine is this process's own.
        """
        return self._backend.load_lora_adapter(name, str(path), inplace=inplace)

    def unload_lora_adapter(self, name: str) -> bool:
        """Forget an adapter, also where requests still use it; whether it was there.

        From a client, and of a fleet, by a commit that makes a version, and has no way back.
        """
        return self._backend.unload_lora_adapter(name)

    def save_sharded_state(self, path: str | Path, *, timeout: float = DEFAULT_TIMEOUT) -> int:
        """Write what every rank holds live to a file of its own in the directory ``path``.

        With the checkpoint's config and tokenizer beside them: an engine starts from it, with
        ``load_format="sharded_state"`` or "auto", without cutting anything where it has as many
        ranks. Components go to directories of their names in it. Generation waits meanwhile, and
        each rank takes as much host memory as it has weights. Returns the version of those
        weights: commits of adapters alone, which are not saved, leave it. Where the engine is this
        process's own and not quantised; else ``ConfigError``. Where some ranks failed, no engine
        starts from what is there: save again.
        """
        return self._backend.save_sharded_state(str(path), check_timeout(timeout))
