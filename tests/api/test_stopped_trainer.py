"""A trainer that does nothing for a while, or any more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from proxies import Proxy
from serving import serve

from rollout import Rollout
from rollout.rpc.client import RolloutClient

TRAINER = """
import sys, time
from safetensors.torch import load_file
from rollout import Rollout
def items():
    for number, item in enumerate(load_file(sys.argv[2] + "/model.safetensors").items()):
        if number == 3:
            print("in the middle", flush=True)
            time.sleep(1)
        yield item
with Rollout.connect(sys.argv[1]) as engine:
    engine.update_weights(items(), transport="grpc_stream")
"""


@pytest.mark.more
@pytest.mark.timeout(240)
def test_a_trainer_that_is_stopped_loses_its_lease_after_the_keepalive(checkpoint: Path) -> None:
    with serve(checkpoint) as service, Rollout.connect(service.grpc) as other:
        command = [sys.executable, "-c", TRAINER, service.grpc, str(checkpoint)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "in the middle\n"
            trainer.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            assert other.update_weights(str(checkpoint), timeout=45).version == 1
            assert time.monotonic() - began < 40
        finally:
            trainer.kill()
            trainer.communicate()


@pytest.mark.more
def test_an_idle_connection_is_never_silent_for_long(engine: Rollout) -> None:
    """NAT and balancers forget one that is, without a word: the next verb would find nobody."""
    with Proxy(engine.address) as proxy:
        client = RolloutClient(proxy.address)
        client.info()
        time.sleep(1)
        before = (proxy.up, proxy.down, proxy.num_open)
        time.sleep(22)
        assert proxy.up > before[0]
        assert proxy.down > before[1]
        assert proxy.num_open == before[2]
        client.close()
