"""Several engines behind one address, whose weights are one transaction.

trainers, clients --> front (``FleetBackend``, behind the servers of an engine)
                        |  routes a call (``router``), sends an update on (``channel``)
                        v
                      ``Fleet`` --> members: engines, each at an address of its own
                        |
                      ``Coordinator``: who serves, what commits; without I/O
                      ``record``: what it has promised, on a local disk
"""
