"""Who serves in a fleet, what commits, and what was promised: all that its coordinator knows.

``coordinator`` is a state machine, of which most of the others are parts: events and the time go
in, ``actions`` come out. Nothing here knows how a member is reached, and nothing but ``record`` and
``member_log`` writes anywhere, so the simulator runs the same code as the service.
"""
