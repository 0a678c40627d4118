"""TRL's trainer, as it is installed, trains against ``rollout serve``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from serving import serve
from tiny_models import write_tiny

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 270
DOCS = ROOT / "docs" / "weight_sync.md"
# As the documentation names them.
ROUTES = re.search(r"--open-routes\s+(\S+)`", DOCS.read_text()).group(1).split(",")


def test_the_stock_grpo_trainer_trains_and_every_sync_arrives(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    # TRL's client sends no token: what it needs, and no more, is opened at an address of its own.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--token", "secret"]
    flags += ["--open-routes", ",".join(ROUTES), "--open-port", str(port)]
    with serve(tmp_path / "tiny", *flags, "--tensor-parallel-size", "2") as served:
        command = [
            sys.executable, str(HERE / "trl_job.py"), str(tmp_path / "tiny"),
            f"http://127.0.0.1:{port}", served.grpc, "secret", str(tmp_path / "out"),
        ]  # fmt: skip
        path = [str(HERE / "stand_in"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "*",
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-4000:]
    got = json.loads(done.stdout.splitlines()[-1])
    syncs, rows = got["syncs"], got["rows"]
    assert [sync["equal"] for sync in syncs] == [True] * 3
    assert [sync["version"] for sync in syncs] == [1, 2, 3]
    assert len({sync["norm"] for sync in syncs}) == 3  # every step changed the weights
    assert len(rows) == 2
    for row in rows:
        # The server's logprobs are those of the distribution it sampled from, as TRL computes them.
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["completions/mean_length"] > 0
