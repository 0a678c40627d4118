"""An engine in a process of its own that takes itself to be on another host: CHECKPOINT HOST."""

import sys

from fleet_front import ENGINE

from rollout import Rollout

checkpoint, host = sys.argv[1:]
with Rollout(checkpoint, **ENGINE) as member:
    member._async.backend._coordinator._host = host
    print(member.address, flush=True)
    sys.stdin.read()
