"""What changes a fleet's weights: every member goes on to the same ones, or none does.

``channel`` is an update, ``rollback`` the way back, each a ``transaction`` in which members vote
and the coordinator decides; ``ways`` and ``hosts`` bring each member its bytes.
"""
