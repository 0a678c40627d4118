"""The public face: ``AsyncRollout``, and ``Rollout`` as its blocking twin; their sessions."""

from rollout.api.async_rollout import AsyncRollout
from rollout.api.ranks import ColocatedRollout
from rollout.api.session import AsyncSession, Session
from rollout.api.sync_rollout import Rollout
from rollout.api.trajectory import Trajectory

__all__ = ["AsyncRollout", "AsyncSession", "ColocatedRollout", "Rollout", "Session", "Trajectory"]
