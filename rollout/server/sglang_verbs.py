"""The weight and control verbs as SGLang's clients call them, over the one verb session."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load

from rollout.api import AsyncRollout
from rollout.config import DEFAULT_TIMEOUT
from rollout.engine.control import WAKE_TAGS
from rollout.engine.updates.verbs.session import TIMEOUT, VerbSession
from rollout.engine.updates.verbs.update import PACK_BYTES, Packing
from rollout.errors import ConfigError, IncompleteUpdate, InvalidRequest
from rollout.generation.metrics import EngineStats
from rollout.server.verbs import Size, UpdateInfo, derived_id, served_of, session_of
from rollout.weight_sync.trainer.publisher import UpdateOptions
from rollout.weight_sync.transports.foreign_group import ForeignGroup
from rollout.weight_sync.versions.directories import inside, looks
from rollout.wire.spellings import near

T = TypeVar("T")
Document = dict[str, Any]
GROUP = "weight_update_group"  # SGLang's own name for it
FLATTENED = Packing(packed=True, nbytes=1 << 62)  # all tensors of a call as one broadcast
PAUSE_MODES = {"abort": "abort", "in_place": "keep", "retract": "recompute"}
DISK_LIMIT = 600.0  # seconds of each wait while a checkpoint is read
_TAGS = ("weights", "kv_cache", "cuda_graph")


class _Body(BaseModel):
    """Fields that SGLang has and that mean nothing here are taken without effect; what is very
    near to one of ours is a mistake.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, given: Any) -> Any:
        known = list(cls.model_fields)
        for name in given if isinstance(given, dict) else ():
            if name not in known and (meant := near(str(name), known)):
                raise ValueError(f"unknown field {name[:80]!r}; did you mean {meant!r}?")
        return given


class NoBody(_Body):
    pass


class VersionBody(_Body):
    new_version: Annotated[str, Field(min_length=1, max_length=1024)] | int
    abort_all_requests: bool = True


class AbortBody(_Body):
    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _says_which(self) -> AbortBody:
        if not self.rid and not self.abort_all:
            raise ValueError("give rid, the id of a request, or abort_all: true")
        return self


class PauseBody(_Body):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class MemoryBody(_Body):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class CheckBody(_Body):
    action: str = "checksum"


class InitGroupBody(_Body):
    """Every rank connects to ``master_address``, "[...]" around it or not."""

    master_address: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[\w.:\[\]-]+$")]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=1 << 20)]
    world_size: Annotated[int, Field(ge=2, le=1 << 20)]
    group_name: Annotated[str, Field(min_length=1, max_length=256)] = GROUP
    backend: str = "nccl"


class DestroyGroupBody(_Body):
    group_name: str = GROUP


class _UpdateBody(_Body):
    """``flush_cache``: whether running requests compute their KV again; else they keep it."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Annotated[str, Field(max_length=1024)] | int | None = None
    load_format: str | None = None

    @property
    def in_flight(self) -> str:
        if self.abort_all_requests:
            return "abort"
        return "recompute" if self.flush_cache else "keep"

    @property
    def label(self) -> str | None:
        return None if self.weight_version is None else str(self.weight_version)


class DiskBody(_UpdateBody):
    model_path: Annotated[str, Field(min_length=1)]


class DistributedBody(_UpdateBody):
    names: list[Annotated[str, Field(min_length=1, max_length=1024)]]
    dtypes: list[str]
    shapes: list[Annotated[list[Size], Field(max_length=16)]]
    group_name: str = GROUP


class TensorBody(_UpdateBody):
    """``serialized_named_tensors``: with ``load_format`` "safetensors" the whole model as
    safetensors files in base64.
    """

    serialized_named_tensors: list[str]


class SglangVerbs:
    """Each verb takes a parsed body; what it raises becomes ``success`` false."""

    def __init__(self, rollout: AsyncRollout) -> None:
        self._rollout = rollout

    # ---- weights ----

    async def from_disk(self, body: DiskBody) -> Document:
        served = served_of(self._rollout)

        def seen() -> tuple[Path, object]:
            path = inside(body.model_path, served.weight_dirs)  # no other is looked into
            return path, looks(path)

        files = await asyncio.to_thread(seen)
        receipt = await self._rollout.update_weights(
            server_path=body.model_path,
            update_id=derived_id("disk", *files, body),
            in_flight=body.in_flight,
            label=body.label,
            timeout=DISK_LIMIT,
        )
        return _done(f"version {receipt.version} is live") | {"num_paused_requests": 0}

    async def from_tensor(self, body: TensorBody) -> Document:
        if body.load_format != "safetensors":
            raise InvalidRequest(
                "pickled tensors are not taken: unpickling runs whatever a sender likes. Send "
                'load_format "safetensors" with serialized_named_tensors as safetensors files in '
                "base64, or use update_weights_from_distributed, update_weights_from_disk or "
                "Rollout.connect(...).update_weights(model)"
            )
        served, tensors = served_of(self._rollout), dict[str, torch.Tensor]()
        for text in body.serialized_named_tensors:
            tensors |= _safetensors(text)
        told = derived_id("tensors", body)
        options = UpdateOptions(update_id=told, in_flight=body.in_flight, label=body.label)
        receipt = await self._rollout.threads.run(lambda: served.update_once(tensors, options))
        return _done(f"version {receipt.version} is live")

    async def init_group(self, body: InitGroupBody) -> Document:
        cuda = (await self._rollout.weight_info()).device.split(":")[0] == "cuda"
        if body.backend != (wanted := "nccl" if cuda else "gloo"):
            raise ConfigError(
                f"backend {body.backend!r}: this engine's ranks join by {wanted!r}; give the "
                "trainer's group the same"
            )
        group = ForeignGroup(
            host=body.master_address.strip("[]"),
            port=body.master_port,
            rank_offset=body.rank_offset,
            size=body.world_size,
            name=body.group_name,
        )
        await self._run(lambda verbs: verbs.init(group, Packing(nbytes=PACK_BYTES), TIMEOUT))
        return _done("Succeeded to initialize custom process group.")

    async def destroy_group(self, body: DestroyGroupBody) -> Document:
        await self._run(lambda verbs: verbs.leave(body.group_name))
        return _done("Succeeded to destroy custom process group.")

    async def begin(self) -> Document:
        started = await self._run(lambda verbs: verbs.start())
        return _done(f"version {started.version} has begun")

    async def from_distributed(self, body: DistributedBody) -> Document:
        if body.load_format not in (None, "auto", "flattened_bucket"):
            raise InvalidRequest(f"load_format {body.load_format!r} is not known")
        packing = FLATTENED if body.load_format == "flattened_bucket" else Packing()
        info = UpdateInfo(names=body.names, dtype_names=body.dtypes, shapes=body.shapes)

        def receive(verbs: VerbSession) -> int:
            verbs.check_group(body.group_name)
            try:
                tensors = info.tensors()
            except InvalidRequest as error:
                verbs.refuse(str(error))
                raise
            # Without a caller: the next step's call is the same to a byte, and no repeat.
            return verbs.update(
                tensors, packing,
                in_flight=body.in_flight, label=body.label, group=body.group_name,
            )  # fmt: skip

        nbytes = await self._run(receive)
        return _done(f"{nbytes} bytes of {len(body.names)} tensors were received")

    async def relabel(self, body: VersionBody) -> Document:
        """The label of what is live, without an update; while one is open, of what it will make."""
        label, session = str(body.new_version), session_of(self._rollout)
        await self._rollout.threads.run(lambda: session.relabel(label))
        if body.abort_all_requests:
            await self._rollout.abort(None)
        return _done(f"Weight version updated to {label}") | {"new_version": label}

    async def end(self) -> Document:
        receipt = await self._run(lambda verbs: verbs.finish())
        return _done(f"version {receipt.version} is live")

    async def check(self, body: CheckBody) -> Document:
        if body.action != "checksum":
            raise InvalidRequest(
                f"action {body.action!r} is not served; checksum is, and check_weights of "
                "Rollout.connect(...) compares with a model"
            )
        digests = await self._rollout.threads.run(
            lambda: self._rollout.backend.digests(DEFAULT_TIMEOUT)
        )
        rows = {name: f"{digest:016x}" for name, digest in sorted(digests.items())}
        told = "".join(f"{name} {row}\n" for name, row in rows.items())
        whole = hashlib.sha256(told.encode()).hexdigest()
        ranks = [{"checksums": rows}]  # over all ranks: of whole tensors, not of shards
        return _done("") | {"ranks": ranks, "per_engine_checksum": whole}

    # ---- control ----

    async def pause(self, body: PauseBody) -> None:
        await self._rollout.pause_generation(PAUSE_MODES[body.mode])

    async def resume(self) -> None:
        """``IncompleteUpdate`` while broadcasts have come that make no whole model.

        However often it is asked: clients ask again, and would sample from the old weights.
        """
        served = self._rollout.backend.served
        session = None if served is None else served.verbs
        if session is not None:
            missing = await self._rollout.threads.run(session.incomplete)
        else:  # it is open elsewhere: at the front that coordinates
            missing = (await self._rollout.weight_info()).incomplete
        if missing:
            raise IncompleteUpdate(
                f"the weights that were sent make no whole model: {missing}. Generation is still "
                "paused: send the rest; or give the update up, and go on with the old version, by "
                "/destroy_weights_update_group or /abort_weight_update"
            )
        await self._rollout.resume_generation()

    async def release(self, body: MemoryBody) -> None:
        """The weights lie in host memory until they are asked for again: nothing is lost.

        What was not asked for is there as before, so that a resume of the same tags serves again.
        """
        asleep = served_of(self._rollout).asleep
        keep = set(WAKE_TAGS) - set(body.tags or _TAGS) - asleep
        if keep != set(WAKE_TAGS):
            await self._rollout.sleep(1)
            if keep:
                await self._rollout.wake_up(sorted(keep))

    async def regain(self, body: MemoryBody) -> None:
        tags = None if body.tags is None else [tag for tag in body.tags if tag != "cuda_graph"]
        await self._rollout.wake_up(tags)

    async def _run(self, verb: Callable[[VerbSession], T]) -> T:
        session = session_of(self._rollout)
        return await self._rollout.threads.run(lambda: verb(session))


async def server_info(rollout: AsyncRollout) -> Document:
    """What clients read of SGLang's own: sizes, the model, and the state of its one scheduler."""
    info, weights = await rollout.server_info(), await rollout.weight_info()
    stats = await rollout.metrics()
    return {
        "model_path": info.model,
        "served_model_name": info.model,
        "tokenizer_path": info.model if info.has_tokenizer else None,
        "skip_tokenizer_init": not info.has_tokenizer,
        "context_length": info.max_model_len,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "device": weights.device,
        "tp_size": weights.tensor_parallel_size,
        "num_gpus": weights.num_ranks,
        "pp_size": weights.pipeline_parallel_size,
        **dict.fromkeys(("dp_size", "ep_size", "nnodes"), 1),
        "disaggregation_mode": "null",
        "weight_version": weights.label or str(weights.version),
        "version": info.package_version,
        # slime holds these two to its own flags: its engines sleep by them (which it asks of none
        # that it has not started), and tell a mixture's experts, as requests ask for them here.
        "enable_memory_saver": False,
        "enable_return_routed_experts": True,
        "internal_states": [{**load_of(stats), "state": stats.state}],
    }


def load_of(stats: EngineStats) -> Document:
    """Of an engine's one scheduler."""
    return {
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "token_usage": stats.kv_usage,
    }


def _done(message: str) -> Document:
    return {"success": True, "message": message}


def _safetensors(text: str) -> dict[str, torch.Tensor]:
    try:
        loaded: dict[str, torch.Tensor] = load(base64.b64decode(text, validate=True))
        return loaded
    except (binascii.Error, ValueError, SafetensorError) as error:
        raise InvalidRequest(
            f"serialized_named_tensors are no safetensors in base64: {error}"
        ) from error
