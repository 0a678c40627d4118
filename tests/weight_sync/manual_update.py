"""An update driven call by call, so that tests can stop anywhere in it."""

from __future__ import annotations

import uuid

import torch

from rollout.kernels import digest
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.messages import BucketHeader, Seal, UpdateRequest
from rollout.weights import Box

BUCKET = 32 << 10


class ManualUpdate:
    """One inline update: ``begin``, ``bucket`` until it says False, ``seal``, ``commit``."""

    def __init__(self, engine, weights: dict[str, torch.Tensor], **request) -> None:
        self.channel = engine.open()
        self.request = UpdateRequest(
            **{"update_id": uuid.uuid4().hex, "bucket_bytes": BUCKET, "timeout": 5.0, **request}
        )
        self.weights = weights
        self.buckets = packed(weights)
        self.sent = 0

    def begin(self):
        return self.channel.begin(self.request)

    def bucket(self) -> bool:
        header, payload = self.buckets[self.sent]
        self.sent += 1
        self.channel.bucket(header, payload)
        self.channel.wait(header.index, self.request.timeout)
        return self.sent < len(self.buckets)

    def seal(self, **more) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        digests = {n: digest(t, shapes[n], Box.full(shapes[n])) for n, t in self.weights.items()}
        self.channel.seal(Seal(num_buckets=self.sent, digests=digests, **more))

    def send_all(self) -> None:
        self.begin()
        while self.bucket():
            pass
        self.seal()

    def commit(self):
        return self.channel.commit()


def packed(weights: dict[str, torch.Tensor]) -> list[tuple[BucketHeader, torch.Tensor]]:
    packer = BucketPacker(BUCKET)
    made = []
    for name, tensor in weights.items():
        made += [(header, payload.clone()) for header, payload in packer.add(name, tensor)]
    made += [(header, payload.clone()) for header, payload in packer.flush()]
    return made
