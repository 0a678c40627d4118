"""The low-level weight verbs over HTTP and gRPC: vLLM's bodies in, plain answers out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollout.api import AsyncRollout
from rollout.api.backend import ServedBackend
from rollout.config import MAX_TIMEOUT
from rollout.engine.updates.verbs.repeats import Caller
from rollout.engine.updates.verbs.session import DEADLINE, TIMEOUT, VerbSession
from rollout.engine.updates.verbs.update import PACK_BYTES, Packing
from rollout.errors import ConfigError, IncompleteUpdate, InvalidRequest
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.transports.foreign_group import ForeignGroup
from rollout.weight_sync.versions.directories import inside
from rollout.weights import TensorMeta
from rollout.wire.codec import to_plain
from rollout.wire.frames import DTYPES

STABLE = "STABLE"
DIRECTORY_LIMIT = 600.0  # seconds of each wait while a directory is read
NO_CHECKPOINT_DELTAS = (
    "SkyRL's checkpoint deltas (weight_sync_backend=delta) are not read here: use "
    "weight_sync_backend=nccl without colocate_all, which broadcasts by vLLM's verbs, or write "
    "each step under a --weight-dir, as a checkpoint or by VersionWriter (which has deltas), and "
    "call update_weights(server_path=...)"
)
T = TypeVar("T", bound=BaseModel)
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT, strict=False)]
Bytes = Annotated[int, Field(gt=0, le=1 << 40)]
Size = Annotated[int, Field(ge=0, lt=1 << 48)]
Document = dict[str, Any]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Packed(_Body):
    """vLLM has these in the update's info up to 0.27 and in the init's from 0.28 on."""

    packed: bool | None = None
    packed_buffer_size_bytes: Bytes | None = None
    packed_num_buffers: int | None = None  # of no concern to a receiver: the order is the same

    def packing(self, otherwise: Packing) -> Packing:
        packed, nbytes = self.packed, self.packed_buffer_size_bytes
        return Packing(
            packed=otherwise.packed if packed is None else packed,
            nbytes=otherwise.nbytes if nbytes is None else nbytes,
        )


class InitInfo(_Packed):
    """``master_address`` is connected to as given, by every rank; ``world_size`` counts the
    trainer too.
    """

    master_address: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[\w.:-]+$")]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=1 << 20)]
    world_size: Annotated[int, Field(ge=2, le=1 << 20)]

    @model_validator(mode="before")
    @classmethod
    def _is_a_group(cls, given: Any) -> Any:
        if isinstance(given, dict) and "local_checkpoint_dir" in given:  # SkyRL's, for its deltas
            raise ValueError(NO_CHECKPOINT_DELTAS)
        return given


class InitBody(_Body):
    init_info: InitInfo
    timeout: Seconds = TIMEOUT


class _OfUpdate(_Body):
    """``update_id``: the caller's own name of the update, by which a repeated verb is known."""

    update_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class StartBody(_OfUpdate):
    """``timeout`` bounds each wait of the update, ``deadline`` the time between two verbs."""

    is_checkpoint_format: bool = True
    timeout: Seconds = TIMEOUT
    deadline: Seconds = DEADLINE
    in_flight: Literal["keep", "recompute", "abort", "wait", "pin"] = "keep"


class UpdateInfo(_Packed):
    names: list[Annotated[str, Field(min_length=1, max_length=1024)]]
    dtype_names: list[str]
    shapes: list[Annotated[list[Size], Field(max_length=16)]]

    def tensors(self) -> list[TensorMeta]:
        """Raises ``InvalidRequest`` for lists of different lengths and for unknown dtypes."""
        counts = [len(self.names), len(self.dtype_names), len(self.shapes)]
        if len(set(counts)) > 1 or not counts[0]:
            raise InvalidRequest(
                f"names, dtype_names and shapes must be of one length, at least 1: {counts}"
            )
        dtypes = [name.removeprefix("torch.") for name in self.dtype_names]
        if unknown := sorted(set(dtypes) - set(DTYPES)):
            raise InvalidRequest(f"unknown dtype_names {unknown[:4]}; known: {', '.join(DTYPES)}")
        rows = zip(self.names, dtypes, self.shapes, strict=True)
        return [TensorMeta(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in rows]


class UpdateBody(_OfUpdate):
    """``index``: which call of the update this is, from 0 on."""

    update_info: UpdateInfo
    index: Annotated[int, Field(ge=0)] | None = None


class WeightDirBody(_Body):
    """prime-rl's, for its transport over files; its trainer writes ``STABLE`` there when done."""

    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)]
    skip_prefix_cache_reset: bool = False  # no cached KV outlives its weights


class FinishBody(_OfUpdate):
    """``weight_version``: a label that ``weight_info`` and the receipt show beside the version."""

    weight_version: Annotated[str, Field(max_length=1024)] | int | None = None


class AbortBody(_OfUpdate):
    reason: Annotated[str, Field(max_length=1024)] = ""


class Verbs:
    """Each verb takes a parsed body and runs in a thread of its own accord, to its end.

    A repeated verb is answered as the first was (``engine/repeats.py``). ``peer`` names the
    connection that the verbs came by: without it they are known as repeated by ``update_id`` alone.
    """

    def __init__(self, rollout: AsyncRollout, peer: str = "") -> None:
        self._rollout, self._peer = rollout, peer

    async def init(self, body: InitBody) -> Document:
        info, caller = body.init_info, Caller(peer=self._peer)
        group = ForeignGroup(
            host=info.master_address,
            port=info.master_port,
            rank_offset=info.rank_offset,
            size=info.world_size,
        )
        packing = info.packing(Packing(nbytes=PACK_BYTES))
        await self._run(lambda verbs: verbs.init(group, packing, body.timeout, caller))
        return {"message": "Weight transfer initialized", "world_size": info.world_size}

    async def start(self, body: StartBody) -> Document:
        if not body.is_checkpoint_format:
            raise InvalidRequest(
                "is_checkpoint_format=false is not supported: send file-form names"
            )
        started = await self._run(
            lambda verbs: verbs.start(
                timeout=body.timeout,
                deadline=body.deadline,
                in_flight=body.in_flight,
                caller=self._caller(body),
            )
        )
        return {
            "message": "Weight update started",
            "version": started.version,
            "update_id": started.update_id,
        }

    async def update(self, body: UpdateBody) -> Document:
        caller = self._caller(body)
        try:
            tensors = body.update_info.tensors()
        except InvalidRequest as error:
            why = str(error)
            await self._run(lambda verbs: verbs.refuse(why, caller))
            raise
        nbytes = await self._run(
            lambda verbs: verbs.update(
                tensors, body.update_info.packing(verbs.packing), caller, body.index
            )
        )
        return {"message": "Weights updated", "num_tensors": len(tensors), "num_bytes": nbytes}

    async def finish(self, body: FinishBody) -> Document:
        label = None if body.weight_version is None else str(body.weight_version)
        receipt = await self._run(lambda verbs: verbs.finish(label, self._caller(body)))
        return {
            "message": "Weight update finished",
            "version": receipt.version,
            "weight_version": receipt.label or str(receipt.version),
            "receipt": to_plain(receipt),
        }

    async def abort(self, body: AbortBody) -> Document:
        found = await self._run(lambda verbs: verbs.abort(body.reason, self._caller(body)))
        if found:
            return {"message": "Weight update aborted"}
        if prepared := self._rollout.backend.prepared:
            return {
                "message": f"Nothing was aborted: update {prepared} is prepared, and is given up "
                "where its update_id is said"
            }
        return {"message": "Nothing to abort"}

    def _caller(self, body: _OfUpdate) -> Caller:
        return Caller(update_id=body.update_id or "", peer=self._peer)

    async def _run(self, verb: Callable[[VerbSession], Any]) -> Any:
        session = session_of(self._rollout)
        return await self._rollout.threads.run(lambda: verb(session))


def served_of(rollout: AsyncRollout, what: str = "these verbs are those of") -> ServedBackend:
    """``ConfigError`` where its server is elsewhere."""
    if (served := rollout.backend.served) is None:
        raise ConfigError(f"{what} the engine's own server: ask it")
    return served


def session_of(rollout: AsyncRollout) -> VerbSession:
    """The weight verbs of this process's engine or front; ``ConfigError`` where it has none."""
    session = served_of(rollout, "the weight verbs are those of").verbs
    if session is None:
        raise ConfigError(
            "this front routes only, and takes no place in a trainer's group: trainers that "
            "broadcast go to the front that coordinates"
        )
    return session


async def update_from_directory(rollout: AsyncRollout, body: WeightDirBody) -> Document:
    """The weights of a directory under a ``--weight-dir``; a repeated call commits nothing
    while they are live.

    Raises ``IncompleteUpdate`` where the trainer's marker is not there yet.
    """
    served = served_of(rollout)
    try:
        marker, written = await asyncio.to_thread(lambda: _marked(body.weight_dir, served))
    except OSError:
        raise IncompleteUpdate(
            f"there is no {STABLE} in {body.weight_dir}: its weights are still being written, or "
            "go another way (prime-rl's weight_broadcast.type nccl or nixl: set it to filesystem); "
            "update_weights(server_path=...) takes any checkpoint"
        ) from None
    receipt = await rollout.update_weights(
        server_path=body.weight_dir,
        update_id=derived_id(marker, written),
        timeout=DIRECTORY_LIMIT,
    )
    return {"status": "ok", "version": receipt.version}


def _marked(directory: str, served: ServedBackend) -> tuple[Path, int]:
    """The trainer's marker, and when it was written; nothing outside is looked into."""
    marker = inside(directory, served.weight_dirs) / STABLE
    return marker, marker.stat().st_mtime_ns


def derived_id(*parts: object) -> str:
    """The ``update_id`` of a request whose client gives none: of one with the same parts it is the
    same, and then it is made once, for as long as what it brought is live.
    """
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def parse(kind: type[T], data: bytes) -> T:
    """A body from its JSON; raises ``InvalidRequest`` naming the fields."""
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        rows = [(".".join(map(str, row["loc"])), row["msg"]) for row in error.errors()[:4]]
        text = "; ".join(f"{where}: {what}" if where else what for where, what in rows)
        raise InvalidRequest(text) from error


def weight_info(info: WeightInfo) -> Document:
    """What is live; ``weight_version`` is the last label, or the number where there is none."""
    return {
        "epoch": info.epoch,
        "version": info.version,
        "weight_version": info.label or str(info.version),
        "state": info.state,
        "dtype": str(info.dtype).removeprefix("torch."),
        "num_tensors": len(info.tensors),
        "num_bytes": sum(meta.nbytes for meta in info.tensors),
        "transports": list(info.transports),
        "last_update_id": info.last_update_id,
        "prepared": info.prepared,
        "fence": info.fence,
        "world_size": info.num_ranks,
    }


async def server_info(rollout: AsyncRollout, logprobs_mode: str) -> Document:
    """The part of vLLM's resolved configuration that trainers read, and our own facts. Settings are
    None where no one engine of this process has them.
    """
    info, weights = await rollout.server_info(), await rollout.weight_info()
    served = rollout.backend.served
    config = None if served is None else served.config
    limits = None if served is None else served.adapter_limits
    cuda = weights.device.split(":")[0] == "cuda"
    return {
        "vllm_config": {
            "weight_transfer_config": {"backend": "nccl" if cuda else "gloo"},
            "model_config": {
                "model": info.model,
                "dtype": str(weights.dtype),
                "max_model_len": info.max_model_len,
                "logprobs_mode": logprobs_mode,
            },
            "parallel_config": {
                "tensor_parallel_size": weights.tensor_parallel_size,
                "world_size": weights.num_ranks,
                "data_parallel_size": 1,
                "pipeline_parallel_size": weights.pipeline_parallel_size,
                "max_parallel_loading_workers": config and config.max_parallel_loading_workers,
                "disable_custom_all_reduce": True,
                "tokenizer_pool_config": None,
                "placement_group": config and config.ray_placement_group,
                "worker_extension_cls": (config and config.worker_extension_cls) or "",
            },
            "lora_config": limits and {"max_lora_rank": limits[0], "max_loras": limits[1]},
        },
        "rollout": {
            "version": info.package_version,
            "epoch": info.epoch,
            "weight_version": info.version,
            "state": info.state,
        },
    }
