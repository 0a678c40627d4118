"""What stands in the place of an engine behind the servers, and serves by a fleet's members.

``backend`` is the front that coordinates; ``routing_front`` is one of any number that only route,
which the first tells who serves (``route_teller``, ``routed_fleet``). ``front`` is what both do.
"""
