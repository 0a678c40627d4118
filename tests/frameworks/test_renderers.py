"""The data client of verifiers and prime-rl, as it is on PyPI, against ``rollout serve``."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.install import folder
from frameworks.jobs import run
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout

CLIENT = folder("renderers")


@pytest.mark.more
@pytest.mark.skipif(CLIENT is None, reason="renderers is not installed: make clients")
def test_the_data_client_of_prime_rl_sends_and_gets_tokens(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    flags = ["--dtype", "float32", "--served-model-name", "tiny"]
    with serve(tmp_path / "tiny", *flags) as served, Rollout.connect(served.grpc) as rollout:
        url = f"http://{served.http}"
        got = run("renderers_job.py", url, tmp_path / "tiny", "tiny", over=CLIENT)[-1]
        params = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        ours = rollout.chat([{"role": "user", "content": "Hi"}], params)[0]
    sample = ours.outputs[0]
    assert got["prompt_ids"] == ours.prompt_token_ids
    assert got["completion_ids"] == sample.token_ids
    assert got["completion_logprobs"] == pytest.approx(sample.logprobs.raw, abs=1e-5)
    assert got["finish_reason"] == "length"
    assert got["errors"]["long"].startswith("OverlongPromptError")
    assert "top_p must be" in got["errors"]["bad"]
