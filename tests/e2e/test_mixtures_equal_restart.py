"""Every kind of mixture: an update from its FSDP2 trainer equals a fresh start, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from start_engines import outcome, start, trainer_job
from tiny_models import write_tiny
from trainer_processes import Job

pytestmark = pytest.mark.more

# (model, ranks of the engine)
MODELS = (
    *(("glm4_moe", 1), ("deepseek_v2", 1), ("deepseek_v3", 2)),
    *(("olmoe", 1), ("minimax_m2", 1), ("gpt_oss", 2), ("llama4", 1), ("glm4_moe_lite", 1)),
)
BUCKET = 16 << 10


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    """One job, which becomes the trainer of one model after the other."""
    where = tmp_path_factory.mktemp("trainer")
    write_tiny(where / "first", "qwen3")
    started = trainer_job("fsdp2", 2, where / "first", where / "log")
    try:
        assert None not in started.answers(120), started.log.read_text()
        yield started
    finally:
        started.close()


def test_a_bias_on_the_choice_of_experts_keeps_its_bits_in_a_bfloat16_engine(
    job: Job, tmp_path: Path
) -> None:
    """Trainers hold it in float32, and learn it in steps that bfloat16 has not."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for seed, path in enumerate((tmp_path / "a", tmp_path / "b")):
        model = write_tiny(path, "glm4_moe", seed=seed, dtype=torch.bfloat16)
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                bias = torch.linspace(1.0, 1.01 + seed, 6)
                module.e_score_correction_bias = bias
        model.save_pretrained(path)
    files = load_file(tmp_path / "b" / "model.safetensors")
    assert files[name].dtype == torch.float32 != files["lm_head.weight"].dtype
    with (
        start(tmp_path / "a", 1, dtype="bfloat16") as engine,
        start(tmp_path / "b", 1, dtype="bfloat16") as cold,
    ):
        for transport in ("p2p", "broadcast"):
            engine.update_weights(str(tmp_path / "a"))
            assert outcome(engine) != outcome(cold)
            job.ask(op="become", path=str(tmp_path / "b"))
            answers = job.ask(
                op="update", address=engine.address, transport=transport, timeout=20,
                bucket_bytes=BUCKET,
            )  # fmt: skip
            assert None not in answers, job.log.read_text()
            assert answers[0] is not None
            assert "receipt" in answers[0], answers
            assert outcome(engine) == outcome(cold)
            assert engine.check_weights(str(tmp_path / "b")).equal


@pytest.mark.parametrize(("arch", "tp"), MODELS)
def test_an_fsdp2_trainer_of_a_mixture_makes_the_engine_that_its_files_would(
    job: Job, tmp_path: Path, arch: str, tp: int
) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for seed, path in enumerate(paths):
        write_tiny(path, arch, seed=seed)
    fresh = []
    settings = {"block_size": 8} if arch == "llama4" else {}  # chunks of 16
    for path in paths:
        with start(path, tp, **settings) as engine:
            fresh.append(outcome(engine))
    assert fresh[0] != fresh[1]
    with start(paths[0], tp, **settings) as engine:
        for which, transport in ((1, "broadcast"), (0, "p2p"), (1, "inline")):
            assert None not in job.ask(op="become", path=str(paths[which])), job.log.read_text()
            answers = job.ask(
                op="update", address=engine.address, transport=transport, timeout=20,
                bucket_bytes=BUCKET,
            )  # fmt: skip
            assert None not in answers, job.log.read_text()
            receipts = [answer.get("receipt", answer) for answer in answers]
            assert receipts[0].get("transport") == transport, receipts
            assert outcome(engine) == fresh[which]
