"""The public face: ``AsyncRollout``, and ``Rollout`` as its blocking twin."""

from rollout.api.async_rollout import AsyncRollout
from rollout.api.sync_rollout import Rollout

__all__ = ["AsyncRollout", "Rollout"]
