"""Large tensors of this process reach an engine in it without a copy into a bucket."""

from __future__ import annotations

import pytest
import torch
from engine_ranks import Engine, same
from trainer import By, Trainer, fresh

from rollout.weight_sync.trainer import bucket_sender
from rollout.weight_sync.transports.inline import InlineSender

SMALL = 4 << 10  # bytes of a bucket: most tensors are cut


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 1, checkpoints[1], "tiles")
    yield engine
    engine.close()


class Noting(InlineSender):
    """Remembers where payloads lie; at most two may be under way."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []
        self.taken: set[int] = set()

    def send(self, channel, header, payload) -> None:
        self.places.append(payload.data_ptr())
        assert header.index < 2 or header.index - 2 in self.taken
        super().send(channel, header, payload)

    def wait(self, channel, index, timeout) -> None:
        super().wait(channel, index, timeout)
        self.taken.add(index)


@pytest.mark.parametrize(("least", "lent"), [(1, True), (1 << 30, False)])
def test_a_source_may_reuse_the_memory_that_it_lends(
    engine, checkpoints, monkeypatch, least, lent
) -> None:
    monkeypatch.setattr(bucket_sender, "MIN_ZERO_COPY", least)
    weights, sender = checkpoints[2 if lent else 1], Noting()
    buffer = torch.empty(max(t.numel() for t in weights.values()))

    def items():
        for name, tensor in weights.items():
            buffer.fill_(torch.nan)
            part = buffer[: tensor.numel()].view(tensor.shape)
            yield name, part.copy_(tensor)

    trainer = Trainer(engine, By(sender))
    receipt = trainer.send(items(), bucket_bytes=SMALL)
    assert receipt.version == engine.version
    assert same(engine.live(), fresh(engine, checkpoints, "tiles", weights))
    inside = range(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
    assert [place in inside for place in sender.places] == [lent] * len(sender.places)


def test_what_is_not_dense_is_copied_between_what_is_lent(engine, checkpoints, monkeypatch) -> None:
    monkeypatch.setattr(bucket_sender, "MIN_ZERO_COPY", 1)
    weights, sender = checkpoints[2], Noting()
    mixed = {
        name: tensor.t().contiguous().t() if tensor.dim() == 2 and i % 2 else tensor
        for i, (name, tensor) in enumerate(weights.items())
    }
    Trainer(engine, By(sender)).send(mixed, bucket_bytes=SMALL)
    assert same(engine.live(), fresh(engine, checkpoints, "tiles", weights))
    own = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in mixed.values()]
    lent = [any(place in at for at in own) for place in sender.places]
    assert any(lent)
    assert not all(lent)
