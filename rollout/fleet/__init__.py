"""Several engines behind one address, whose weights are one transaction.

trainers, clients --> front (``fronts``: ``FleetBackend``, behind the servers of an engine)
                        |  routes a call (``calls``), sends an update on (``updates``)
                        v
                      ``Fleet`` --> members: engines, each at an address of its own (``link``),
                        |           some of them started by the front (``launching``)
                        v
                      ``coordination``: who serves, what commits, what it has promised

Each imports only what stands below it here. What all of them need lies in this folder itself. The
``simulation`` runs a coordinator over members that are models.
"""
