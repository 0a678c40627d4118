"""Every architecture: an update from its FSDP2 trainer equals a fresh start, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from start_engines import outcome, start, trainer_job
from tiny_models import DENSE, write_tiny
from tiny_vision import END, PAD, START, check_greedy, picture, write_vision
from trainer_processes import Job

from rollout import Rollout, SamplingParams

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("forked_ranks")]

# What others are made of; where the window of a file is the default, one that acts.
BASES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "mistral": {"sliding_window": 7}}
MIXTURES = (
    *("glm4_moe", "deepseek_v2", "deepseek_v3", "olmoe", "minimax_m2", "gpt_oss", "llama4"),
    *("deepseek_v32", "glm_moe_dsa"),
    *("glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "phimoe", "granite_hybrid", "nemotron_h"),
    *("kimi_linear", "qwen3_moe", "qwen2_moe", "mixtral"),
)
# With two ranks: fused files, norms over all ranks, norms of each head; groups, stacked experts.
TWO_RANKS = (
    *("phi3", "olmo3", "cohere", "deepseek_v3", "gpt_oss", "qwen3_next", "granite_hybrid"),
    *("olmo_hybrid", "kimi_linear", "deepseek_v32"),
)
BUCKET = 16 << 10
PICTURED = [5, 6, START, PAD, END, 9, 8]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)


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
            update(job, engine, transport)
            assert outcome(engine) == outcome(cold)
            assert engine.check_weights(str(tmp_path / "b")).equal


@pytest.mark.parametrize("arch", [*DENSE, *BASES, *MIXTURES])
def test_an_fsdp2_trainer_makes_the_engine_that_its_files_would(
    job: Job, tmp_path: Path, arch: str
) -> None:
    paths, tp = [tmp_path / name for name in ("a", "b")], 2 if arch in TWO_RANKS else 1
    for seed, path in enumerate(paths):
        write_tiny(path, arch, seed=seed, **BASES.get(arch, {}))
    settings = {"block_size": 8} if arch == "llama4" else {}  # chunks of 16
    with start(paths[1], tp, **settings) as engine:
        second = outcome(engine)
    with start(paths[0], tp, **settings) as engine:
        fresh = [outcome(engine), second]
        assert fresh[0] != fresh[1]
        inline = [(1, "inline")] if arch in MIXTURES else []
        for which, transport in ((1, "broadcast"), (0, "p2p"), *inline):
            assert None not in job.ask(op="become", path=str(paths[which])), job.log.read_text()
            assert update(job, engine, transport)["transport"] == transport
            assert outcome(engine) == fresh[which]


@pytest.mark.parametrize(("kind", "tp"), [("qwen3_vl", 2), ("qwen3_vl_moe", 1), ("qwen3_5", 1)])
def test_an_fsdp2_trainer_brings_the_tower_to_every_rank(
    job: Job, tmp_path: Path, kind: str, tp: int
) -> None:
    paths, image = [tmp_path / name for name in ("a", "b")], picture(1)
    models = [write_vision(path, kind, seed=seed) for seed, path in enumerate(paths)]

    def pictured(engine: Rollout, which: int) -> Any:
        [output] = engine.generate([PICTURED], GREEDY, images=[[image]])
        check_greedy(models[which], output, [image])
        return outcome(engine), output.outputs[0].token_ids, output.outputs[0].logprobs.raw

    with start(paths[1], tp, max_num_batched_tokens=16) as engine:
        second = pictured(engine, 1)
    with start(paths[0], tp, max_num_batched_tokens=16) as engine:
        fresh = [pictured(engine, 0), second]
        for which, transport in ((1, "broadcast"), (0, "p2p")):
            assert None not in job.ask(op="become", path=str(paths[which])), job.log.read_text()
            assert update(job, engine, transport)["transport"] == transport
            assert pictured(engine, which) == fresh[which]


def update(job: Job, engine: Rollout, transport: str) -> dict[str, Any]:
    """The receipt on the first rank."""
    answers = job.ask(
        op="update", address=engine.address, transport=transport, timeout=20, bucket_bytes=BUCKET
    )
    assert None not in answers, job.log.read_text()
    assert answers[0] is not None
    assert "receipt" in answers[0], answers
    return answers[0]["receipt"]
