"""verl's ``CheckpointEngine`` over this engine's transports: ``checkpoint_engine.backend=rollout``.

verl's driver          build_topology  asks the replicas' workers where their servers listen
trainer, first rank    send_weights    one update of every replica's engine; all or none
trainer, other ranks   send_weights    take part in the gathers
rollout's workers      nothing: the weights go to the engines' own ranks
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import ray
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from rollout.distributed.native_thread import on_this_stream
from rollout.errors import ConfigError
from rollout.integrations.fan_out import FanOut
from rollout.weight_sync.protocol.receipts import UpdateReceipt

NAME = "rollout"
_PULL = 600.0  # seconds that verl's side may take for its next tensor


@CheckpointEngineRegistry.register(NAME)
class TransportEngine(CheckpointEngine):  # type: ignore[misc]
    """``options``: keywords of ``Rollout.update_weights`` (``transport``, ``encoding``,
    ``in_flight``, ``timeout`` ...), from ``checkpoint_engine.engine_kwargs.rollout``.
    """

    wire_format = NAME  # tells ``ServerAdapter`` that nothing comes through it

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        self._is_master = is_master
        self._options = {"bucket_bytes": bucket_size, **options}
        self._engines: FanOut | None = None
        self._reached: dict[str, str | None] = {}
        self._servers: list[Any] = []

    def prepare(self) -> dict[str, Any]:
        """The Ray actor that this is in: ``build_topology`` asks those of the rollout."""
        return {"worker": ray.get_runtime_context().current_actor}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every trainer rank is told all replicas' servers; the rollout's workers need none."""
        servers = _servers([said["worker"] for said in metadata[actor_wg_world_size:]])
        return {"servers": [servers] * actor_wg_world_size}, {"servers": [[]] * rollout_world_size}

    def init_process_group(self, servers: Sequence[tuple[Any, str, str | None]]) -> None:
        """``servers``: (Ray actor, "host:port", token). Connections last while they are the same,
        and with them what deltas are compared with.
        """
        if not self._is_master:
            return
        reached = {address: token for _, address, token in servers}
        if self._engines is None or reached != self._reached:
            self._close()
            self._engines = FanOut(reached, **self._options)
        self._reached, self._servers = reached, [server for server, _, _ in servers]

    async def send_weights(
        self, weights: Any, global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Make what ``weights`` yields the next version of every replica; all ranks of the trainer
        call it, and read ``weights`` to the end.

        A failure raises on the first rank, and every engine serves on as it was. Returns there
        what the sync took, in seconds and bytes, for verl's log.
        """
        if not self._is_master:
            await drain(weights)
            return None
        if self._engines is None:
            raise ConfigError("send_weights comes after init_process_group")
        try:
            receipts = await self._send(self._engines, weights)
        finally:
            await drain(weights)  # the others are in the gathers that are left
        if global_steps is not None:
            told = zip(self._servers, receipts, strict=True)
            await asyncio.gather(
                *(s.set_global_steps.remote(global_steps, r.version) for s, r in told)
            )
        return _metrics(receipts)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Yields nothing: the engines' ranks have received."""
        nothing: tuple[tuple[str, Tensor], ...] = ()
        for item in nothing:
            yield item

    def finalize(self) -> None:
        """Nothing is held between two updates but connections."""

    async def _send(self, engines: FanOut, weights: Any) -> list[UpdateReceipt]:
        if isinstance(weights, AsyncIterator):
            items = _whole(pulled(weights, asyncio.get_running_loop()))
            return await asyncio.to_thread(on_this_stream(partial(engines.update, items)))
        return engines.update(_whole(weights))  # here, where the trainer's collectives belong

    def _close(self) -> None:
        if self._engines is not None:
            self._engines.close()
            self._engines = None


def server_name(replica: int, suffix: str = "") -> str:
    return f"{NAME}_server_{replica}_0{suffix}"


async def drain(weights: Any) -> None:
    if isinstance(weights, AsyncIterator):
        async for _ in weights:
            pass
    else:
        for _ in weights:
            pass


def pulled(
    weights: AsyncIterator[tuple[str, Tensor]], loop: asyncio.AbstractEventLoop
) -> Iterator[tuple[str, Tensor]]:
    """What an asynchronous stream of ``loop`` yields, in another thread."""
    while True:
        item: Any = asyncio.run_coroutine_threadsafe(_next(weights), loop).result(_PULL)
        if item is None:
            return
        yield item


def _whole(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Of a model with adapters that are not merged verl sends this way the base alone."""
    for name, tensor in weights:
        if ".base_layer." in name:
            raise ConfigError(f"{name} comes without its adapter: set model.lora.merge=True")
        yield name, tensor


async def _next(weights: AsyncIterator[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
    return await anext(weights, None)


def _servers(workers: Sequence[Any]) -> list[tuple[Any, str, str | None]]:
    """Each replica's server, where it listens and its token, by asking verl's workers."""
    leads = ray.get([worker.is_leader_rank.remote() for worker in workers])
    ranks = ray.get([worker.get_replica_rank.remote() for worker in workers])
    names = [server_name(rank) for rank, lead in zip(ranks, leads, strict=True) if lead]
    try:
        servers = [ray.get_actor(name) for name in names]
    except ValueError as error:
        raise ConfigError(
            f"checkpoint_engine.backend={NAME} sends to this engine alone: set "
            f"actor_rollout_ref.rollout.name={NAME} ({error})"
        ) from None
    reached = ray.get([server.reached_at.remote() for server in servers])
    return [(server, *where) for server, where in zip(servers, reached, strict=True)]


def _metrics(receipts: Sequence[UpdateReceipt]) -> dict[str, float]:
    """The slowest replica's seconds, by part; the bytes of one replica."""
    slowest = max(receipts, key=lambda receipt: receipt.timings["total"])
    parts = {f"weight_sync/{part}_s": seconds for part, seconds in slowest.timings.items()}
    return {**parts, "weight_sync/wire_bytes": float(slowest.wire_bytes)}
