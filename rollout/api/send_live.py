"""An engine brings another up to date: what is live here, as an update there."""

from __future__ import annotations

from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.live_form import check_equal, send_live_form
from rollout.engine.updates.live_weights import live_adapters, live_weights
from rollout.errors import (
    DeadlineExceeded,
    EngineClosed,
    SourceFailed,
    TransferFailed,
    VersionConflict,
)
from rollout.rpc.client import RolloutClient
from rollout.rpc.tls import ClientTls, ServerTls
from rollout.rpc.update_channel import REACH
from rollout.weight_sync.protocol.membership import SendTo
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish


def send_live(
    coordinator: Coordinator, request: SendTo, shown: ServerTls | None = None
) -> UpdateReceipt:
    """The receipt of the other's commit. ``VersionConflict`` where ``request.version`` is not live
    here; ``UpdateInProgress`` where an update of this engine has waited for it. ``shown``: our own
    certificate, where the other asks for one.
    """
    tls = ClientTls.of_peer(request.tls_ca, request.tls_server_name, shown)
    peer = RolloutClient(request.address, request.token or None, request.timeout, tls)
    try:
        # Before any lease: who does not answer keeps no update waiting.
        try:
            there = peer.info()
        except (EngineClosed, DeadlineExceeded) as error:
            raise TransferFailed(
                f"{request.address} does not answer this member, if it answers others; {REACH}"
            ) from error
        if there.epoch == coordinator.engine.epoch:
            raise TransferFailed(
                f"{request.address} leads this member to itself, as loopback does; {REACH}"
            )
        return _send(coordinator, request, peer, there)
    finally:
        peer.close()


def _send(
    coordinator: Coordinator, request: SendTo, peer: RolloutClient, there: WeightInfo
) -> UpdateReceipt:
    core = coordinator.engine
    with coordinator.turn.reading(request.timeout) as lease:
        if core.version != request.version:
            raise VersionConflict(f"version {core.version} is live here, not {request.version}")
        info = coordinator.info()
        lacks = info.adapter_digests.items() - there.adapter_digests.items()
        adapters = live_adapters(coordinator, dict(lacks), request.timeout)
        lease.check()
        after = info.adapters if info.adapters or there.adapters else None
        if info.grid is not None or there.grid is not None:
            check_equal(info, there)
            return send_live_form(
                coordinator, lease, peer.open(), adapters, version=request.version,
                adapters_after=after, timeout=request.timeout,
            )  # fmt: skip
        metadata = tuple(coordinator.served.wanted.tensors.values())
        try:
            return publish(
                lease.pieces(live_weights(core, metadata, request.timeout)),
                adapters=adapters,
                connect=lambda: peer,
                options=UpdateOptions(
                    version=request.version, encoding="full", timeout=request.timeout,
                    transport="grpc_stream" if request.tls_ca else "auto",  # through that port
                    label=info.label, adapters_after=after, merged=info.merged,
                ),
            )  # fmt: skip
        except SourceFailed:
            lease.check()  # says it plainly
            raise
