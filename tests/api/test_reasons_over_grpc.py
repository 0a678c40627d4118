"""Both ends of an update over gRPC are told why it failed."""

import threading

import pytest

from rollout import Rollout
from rollout.errors import EngineClosed, SourceFailed

TRANSPORTS = ("grpc_stream", "ipc", "broadcast")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_engine_notes_why_the_trainer_gave_up(engine, other_weights, transport) -> None:
    def failing():
        for number, item in enumerate(other_weights.items()):
            if number == 6:
                raise OSError("the disk of the trainer is full")
            yield item

    with Rollout.connect(engine.address, timeout=10) as client:
        with pytest.raises(SourceFailed, match="disk of the trainer"):
            client.update_weights(failing(), transport=transport, bucket_bytes=8192)
        assert "disk of the trainer is full" in client.metrics().weight_update_errors[-1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_update_hears_that_its_engine_is_shut_down(checkpoint, other_weights, transport) -> None:
    with Rollout(checkpoint, device="cpu", num_threads=1, num_kv_blocks=32) as engine:
        ends = threading.Thread(target=engine.shutdown)

        def waiting():
            for number, item in enumerate(other_weights.items()):
                if number == 6:
                    ends.start()
                    ends.join()
                yield item

        told = pytest.raises(EngineClosed, match="was shut down during the update")
        with Rollout.connect(engine.address, timeout=10) as client, told:
            client.update_weights(waiting(), transport=transport, bucket_bytes=8192, timeout=5)
