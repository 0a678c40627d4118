"""Who is in the fleet behind this address: looked at, added and let go while it runs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from rollout.api.backend import Members, StartedMembers
from rollout.errors import ConfigError
from rollout.fleet.launching.replicas import is_name
from rollout.server.auth import Access
from rollout.server.http.guard import Engine, Routes

routes = Routes()
MAX_NOTICE = 3600.0  # seconds for which a member that is let go may be waited for


class MemberBody(BaseModel):
    """``address``: "host:port" of the engine's gRPC server. ``token``: its control token.
    ``tls_server_name``: what its certificate is made out to, where that is not what others' are.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    address: Annotated[str, Field(max_length=300)]
    token: Annotated[str, Field(max_length=4096)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    tls_server_name: Annotated[str, Field(min_length=1, max_length=300)] | None = None


@routes.on("GET", "/fleet/members", Access.GENERATION, at_once=True)
async def members(rollout: Engine) -> dict[str, Any]:
    """What is live, and for each member whether it serves, or why not."""
    fleet = _fleet(rollout)
    return {
        "fleet": fleet.fleet_id, "epoch": fleet.epoch, "version": fleet.version,
        "members": fleet.members(),
    }  # fmt: skip


@routes.on("POST", "/fleet/members", Access.CONTROL, at_once=True)
async def add_member(rollout: Engine, body: MemberBody) -> dict[str, Any]:
    """It gets the live weights from another member, and then requests; it may come up later."""
    fleet = _fleet(rollout)
    if body.name is not None and _started(rollout) is not None and is_name(body.name):
        raise ConfigError(
            f"{body.name!r} is a name of engines that this front starts itself: give another"
        )
    name = await asyncio.to_thread(
        lambda: fleet.add(
            body.address, body.token, body.name, tls_server_name=body.tls_server_name, ask=True
        )
    )
    return {"name": name, "members": fleet.members()}


@routes.on("DELETE", "/fleet/members", Access.CONTROL, at_once=True)
async def remove_member(
    rollout: Engine, name: str, notice: Annotated[float, Query(ge=0, le=MAX_NOTICE)] = 0.0
) -> dict[str, Any]:
    """No request goes there any more; those under way have ``notice`` seconds to end, and go on
    elsewhere then. In the place of one that the front has started it starts another.
    """
    fleet, started = _fleet(rollout), _started(rollout)

    def leave() -> None:
        if started is None or not started.replace(name, notice):
            fleet.leave(name, notice)

    await rollout.threads.run(leave)
    return {"name": name, "members": fleet.members()}


class ReplicasBody(BaseModel):
    """``count``: how many engines there are to be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    count: Annotated[int, Field(ge=1)]


@routes.on("GET", "/fleet/replicas", Access.GENERATION, at_once=True)
async def replicas(rollout: Engine) -> dict[str, Any]:
    """How many engines the front starts, and what those wait for that are not there yet."""
    return _replicas(rollout).describe()


@routes.on("POST", "/fleet/replicas", Access.CONTROL, at_once=True)
async def scale(rollout: Engine, body: ReplicasBody) -> dict[str, Any]:
    """More of them, or fewer; answered before they are there, or gone."""
    found = _replicas(rollout)
    await asyncio.to_thread(found.scale, body.count)
    return found.describe()


def _replicas(rollout: Engine) -> StartedMembers:
    if (found := _started(rollout)) is None:
        raise ConfigError(
            "this front starts no engines: `rollout serve MODEL --replicas N` and `rollout fleet "
            "MODEL --ray` do; others are added with POST /fleet/members"
        )
    return found


def _started(rollout: Engine) -> StartedMembers | None:
    served = rollout.backend.served
    return None if served is None else served.replicas


def _fleet(rollout: Engine) -> Members:
    served = rollout.backend.served
    if served is None or served.fleet is None:
        raise ConfigError(
            "this is one engine: only `rollout serve MODEL --replicas N` and `rollout fleet` have "
            "members"
        )
    return served.fleet
