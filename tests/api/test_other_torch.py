"""A trainer and an engine of different versions of torch: the normal case.

    ROLLOUT_OTHER_TORCH=/path/to/python pytest tests/api/test_other_torch.py

names the interpreter of an environment with another torch and what this package needs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from other_torch_job import PROMPT
from safetensors.torch import load_file
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams

OTHER = os.environ.get("ROLLOUT_OTHER_TORCH", "")
JOB = Path(__file__).parent / "other_torch_job.py"
WAYS = ("ipc", "grpc_stream", "broadcast", "p2p", "auto", "grpc_stream+delta")
LIMIT = 300  # seconds of a trainer, for hangs

pytestmark = [
    pytest.mark.skipif(not OTHER, reason="ROLLOUT_OTHER_TORCH names no interpreter"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny(path)
    return path


def trained(python, model, address, folder):
    """What a job of two ranks, run by ``python``, says of each of its updates."""
    updates = [f"{2.0 ** -(1 + index)}={way}" for index, way in enumerate(WAYS)]
    root = JOB.parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [python, JOB, str(rank), "2", str(folder / "store"), model, address, *updates],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    return [json.loads(line) for line in said[0].splitlines() if line.startswith('{"torch"')]


@pytest.mark.parametrize("engine_is_other", [False, True], ids=["its trainer", "its engine"])
def test_by_every_transport_the_engine_holds_what_a_trainer_of_another_torch_has(
    engine_is_other, model, tmp_path
):
    """Digests and tokens are those of the same weights sent by this torch."""
    engine, trainer = (OTHER, sys.executable) if engine_is_other else (sys.executable, OTHER)
    weights = load_file(model / "model.safetensors")
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with (
        serve(model, "--tensor-parallel-size", "2", python=engine) as served,
        Rollout.connect(served.grpc, timeout=60) as rollout,
    ):
        said = trained(trainer, model, served.grpc, tmp_path)
        assert [each["way"] for each in said] == list(WAYS)
        for each in said:
            assert "error" not in each, each
            assert (each["torch"] != torch.__version__) is not engine_is_other
            sent = {name: tensor * each["by"] for name, tensor in weights.items()}
            receipt = rollout.update_weights(sent.items(), encoding="full", timeout=60)
            assert str(receipt.digest) == each["digest"], each
            tokens = list(rollout.generate(PROMPT, greedy)[0].outputs[0].token_ids)
            assert tokens == each["tokens"], each
        asked = {each["way"]: each["transport"] for each in said}
        assert all(asked[way] == way for way in ("ipc", "grpc_stream", "broadcast", "p2p"))
