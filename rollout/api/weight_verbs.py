"""The verbs of weights: blocking, in the thread of the trainer's collectives."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.api.arguments import as_flag, as_path
from rollout.api.backend import Backend
from rollout.config import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT, check_timeout
from rollout.errors import FORKED, SHUT_DOWN, ConfigError, EngineClosed, InvalidRequest
from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.shard_layout import PlanCache
from rollout.weight_sync.trainer.sources.update import own_adapters
from rollout.weight_sync.trainer.weight_report import WeightReport
from rollout.weight_sync.trainer.weight_report import check_weights as check
from rollout.weight_sync.trainer.weight_report import preflight as preflight_source
from rollout.weight_sync.versions.adapter_files import check_name
from rollout.weights.adapters import AdapterLoaded
from rollout.weights.components import POLICY
from rollout.wire.spellings import VERBS, explains_arguments


@explains_arguments(VERBS, ConfigError)
class WeightVerbs:
    """One engine's weights, as a trainer sees them; ``timeout`` (seconds, at most a day) bounds
    every wait.
    """

    def __init__(self, backend: Backend) -> None:
        self._over: Backend | None = backend
        self._process = os.getpid()
        self._delta_base, self._plans = DeltaBase(), PlanCache()

    @property
    def _backend(self) -> Backend:
        if self._over is None:
            raise EngineClosed(SHUT_DOWN)
        if self.is_forked:
            raise EngineClosed(FORKED)
        return self._over

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a forked process, which has none of the threads behind it."""
        return os.getpid() != self._process

    @property
    def is_closed(self) -> bool:
        return self._over is None

    def close(self) -> None:
        """For good: a client's would connect again. Ranks that send together all get the error."""
        self._over = None

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

        - ``source``: a module (plain, DDP, FSDP, ZeRO), an iterable of ``(name, tensor)``, a
          checkpoint directory or a ``WeightSource``. A distributed source makes the call
          collective: every rank makes it, and all get the same receipt or the same error.
        - ``server_path``: instead of a source, a checkpoint or version directory that the engine's
          own host reads, under one of its ``--weight-dir``. With an ``update_id``, a repeated call
          gets the first call's receipt for as long as that version is live.
        - ``version``: the number to commit as, above the live one (None: the next); at most 2**52
          where it is not the next.
        - ``transport``: auto | inline | grpc_stream | broadcast | ipc | reshard | p2p, or a
          ``Transport``.
        - ``encoding``: auto | full | delta | delta-zstd. A delta keeps a copy of what was sent in
          host memory. It falls back to a full update where the engine holds other weights, and
          sends one every ``anchor_every`` updates.
        - ``in_flight``: what becomes of running requests: keep | recompute | abort | wait | pin.
          Pinned requests finish on the old version within ``pin_timeout`` (None: ``timeout``);
          after that ``pin_fallback`` applies: keep | recompute | abort. Requests that ask for it
          (``SamplingParams(pin=True)``) are pinned whatever ``in_flight`` says.
        - ``partial``: tensors that are not sent keep their live values.
        - ``max_stall`` (seconds in which no step may run) and ``max_extra_memory`` (bytes that a
          rank may take on its device beside what it holds): an update that would exceed either is
          refused before anything moves. The ``LimitExceeded`` says what it would need.
        - ``adapters``: LoRA adapters by name (PEFT models, or directories that PEFT wrote), with or
          without a source. Only their factors are sent, into slots of the engine
          (``max_adapters``); they go live in the same commit, as ``name@version``. If the source
          is one of these models it is sent unmerged; any other PEFT model is merged first.
        - ``adapters_only``: send only the active adapters of ``source``, a PEFT model, under the
          names that they have there.

        The receipt's ``details`` say which transport and encoding were used, and why. Raises a
        ``WeightError`` (the old version keeps serving) or an ``EngineError``.
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
        source, adapters = _to_send(source, adapters, adapters_only, server_path)
        if update_id is not None and server_path is None:
            raise ConfigError("update_id goes with server_path=: other updates get their own")
        if server_path is not None:
            options.to_server()
            return self._backend.update_from(as_path(server_path, "server_path"), options)
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
        if self._over is not None:  # ranks that did not send learn it, too
            self._over.committed(receipt, partial=builds_on_live)
        return receipt

    def weight_info(self) -> WeightInfo:
        """Which version is live, and what a full update must send."""
        return self._backend.info()

    def rollback(self, timeout: float = DEFAULT_TIMEOUT) -> UpdateReceipt:
        """Serve the version before the last commit again, under a new number.

        Possible once, and until the next update begins; otherwise ``VersionConflict``.
        """
        return self._backend.rollback(check_timeout(timeout))

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        """Receipts of the last 64 commits at most, oldest first, whoever sent them."""
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
        """Load the adapter of a PEFT directory as ``name``. Blocks; embedded engines only.

        With ``max_adapters`` it is kept beside the weights, and requests name it
        (``SamplingParams(adapter=name)``). Loading the same name again makes a new version;
        requests that have begun finish with the old one. Without ``max_adapters`` it is merged
        into the weights. Files that have not changed are not read again, unless ``inplace``.
        ``ConfigError`` if it cannot be read or does not fit, ``WeightMismatch`` if its tensors are
        of another base model; nothing has changed then.
        """
        check_name(name)
        path, inplace = as_path(path, "the adapter's path"), as_flag(inplace, "inplace")
        return self._backend.load_lora_adapter(name, path, inplace=inplace)

    def unload_lora_adapter(self, name: str) -> bool:
        """Unload an adapter, even if requests still use it; returns whether it was loaded.

        For a client and for a fleet this is a commit: it makes a version, and cannot be rolled
        back.
        """
        check_name(name)
        return self._backend.unload_lora_adapter(name)

    def save_sharded_state(self, path: str | Path, *, timeout: float = DEFAULT_TIMEOUT) -> int:
        """Write what every rank holds live to a file of its own in the directory ``path``.

        With the checkpoint's config and tokenizer beside them: an engine starts from it, with
        ``load_format="sharded_state"`` or "auto", without cutting anything where it has as many
        ranks. Components go to directories of their names in it. Generation waits meanwhile, and
        each rank takes as much host memory as it has weights. Returns the version of those
        weights: commits of adapters alone, which are not saved, leave it. Where the engine is this
        process's own and not quantised; else ``ConfigError``. An update with ``staging="none"``
        that is under way is waited for (``UpdateInProgress`` at ``timeout``), and a broken engine
        saves nothing (``EngineBroken``). Where some ranks failed, no engine starts from what is
        there: save again.
        """
        return self._backend.save_sharded_state(as_path(path, "path"), check_timeout(timeout))

    def collective_rpc(
        self,
        method: str,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Any]:
        """Run ``method`` of ``worker_extension_cls`` on every rank; what each returned, by rank.

        Arguments and results are what JSON holds: the ranks may be other processes, also on other
        hosts. It runs between two steps, so that generation waits until it has ended on all ranks.
        ``InvalidRequest`` where there is no such method, ``EngineError`` where it raises,
        ``DeadlineExceeded`` naming the ranks that were not done within ``timeout`` (they go on,
        and generation waits for them). Embedded engines only.
        """
        if not isinstance(method, str):
            raise InvalidRequest(
                f"collective_rpc takes a method's name, got {type(method).__name__}: ranks are "
                "sent no code; put the function into the class of worker_extension_cls"
            )
        try:
            sent = json.dumps([list(args), dict(kwargs or {})], allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"collective_rpc {method}: arguments must be what JSON holds: {error}"
            ) from error
        plain, named = json.loads(sent)  # alike for a rank in this process and for others
        return self._backend.collective_rpc(method, plain, named, check_timeout(timeout))


def _to_send(
    source: Any, adapters: Mapping[str, Any] | None, adapters_only: bool, server_path: Any
) -> tuple[Any, Mapping[str, Any] | None]:
    """The source and the adapters that these arguments of ``update_weights`` mean."""
    if not isinstance(adapters, Mapping | None):
        raise ConfigError(
            f"adapters must map names to PEFT models or directories, got {adapters!r:.80}"
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
        raise ConfigError("update_weights takes a source, adapters= or both; or server_path= alone")
    return source, adapters
