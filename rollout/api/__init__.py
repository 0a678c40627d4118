"""The public face: ``AsyncRollout``, and ``Rollout`` as its blocking twin; their sessions."""

from rollout.api.async_rollout import AsyncRollout
from rollout.api.colocated.ranks import ColocatedRollout
from rollout.api.sessions.session import AsyncSession, Session
from rollout.api.sessions.trajectory import Trajectory
from rollout.api.sync_rollout import Rollout

__all__ = ["AsyncRollout", "AsyncSession", "ColocatedRollout", "Rollout", "Session", "Trajectory"]
