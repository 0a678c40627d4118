"""A recurrent state that was kept."""


class Snapshot:
    """One slot with the state after some position; kept while anybody holds it or it can be found.

    ``digest``: by what it is found, the hash of the block that ends there; empty: by nothing.
    """

    __slots__ = ("digest", "holders", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.holders, self.digest = slot, 0, b""
