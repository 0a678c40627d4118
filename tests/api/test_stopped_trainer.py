"""A trainer's process that is there and does nothing any more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import serve

from rollout import Rollout

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
