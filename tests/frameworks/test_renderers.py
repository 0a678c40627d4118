"""The data client of verifiers and prime-rl, as it is on PyPI, against ``rollout serve``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clients.install import folder
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENT = folder("renderers")


@pytest.mark.more
@pytest.mark.skipif(CLIENT is None, reason="renderers is not installed: make clients")
def test_the_data_client_of_prime_rl_sends_and_gets_tokens(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    flags = ["--dtype", "float32", "--served-model-name", "tiny"]
    with serve(tmp_path / "tiny", *flags) as served, Rollout.connect(served.grpc) as rollout:
        job = str(HERE / "renderers_job.py")
        command = [sys.executable, job, f"http://{served.http}", str(tmp_path / "tiny"), "tiny"]
        env = {**os.environ, "PYTHONPATH": f"{CLIENT}{os.pathsep}{ROOT}", "NO_PROXY": "*"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        got = json.loads(done.stdout.splitlines()[-1])
        params = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        ours = rollout.chat([{"role": "user", "content": "Hi"}], params)[0]
    sample = ours.outputs[0]
    assert got["prompt_ids"] == ours.prompt_token_ids
    assert got["completion_ids"] == sample.token_ids
    assert got["completion_logprobs"] == pytest.approx(sample.logprobs.raw, abs=1e-5)
    assert got["finish_reason"] == "length"
    assert got["errors"]["long"].startswith("OverlongPromptError")
    assert "top_p must be" in got["errors"]["bad"]
