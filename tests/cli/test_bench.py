"""``rollout bench``: its figures add up, and nothing of the profile stays behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny
from tiny_vision import write_vision

from rollout.cli.bench import summary
from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.engine.profile import EngineProfile
from rollout.kernels import linear, rms_norm

Run = Callable[..., tuple[int, str, str]]
SHORT = ("--sequences", 3, "--prompt-tokens", 9, "--new-tokens", 5, "--rounds", 1)
CPU = ("--device", "cpu", "--num-threads", "1", "--dtype", "float32")


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_a_profile_names_every_part_of_a_step_on_one_and_two_ranks(
    run: Run, tiny: Path, ranks: int, stages: int
) -> None:
    sizes = "--tensor-parallel-size", ranks, "--pipeline-parallel-size", stages
    status, out, err = run("bench", tiny, *SHORT, *CPU, "--profile", "--json", *sizes)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["ranks"], len(found["tokens_per_s"])) == (ranks * stages, 1)
    assert found["tokens_per_s"][0] > 0
    assert 0 < found["first_token_s"] < 60
    kinds = found["profile"]["kinds"]
    assert (kinds["prefill"]["steps"], kinds["decode"]["steps"]) == (1, 4)
    for figures in kinds.values():
        assert set(figures["parts_ms"]) == {
            "schedule", "build", "to ranks and back", "forward", "sample", "rest of rank 0",
            "book", "detokenise", "publish",
        }  # fmt: skip
        ops = figures["ops"]["forward"]
        assert {"paged_attention", "add_rms_norm", "between ops"} <= set(ops)
        inside = sum(op["ms"] for op in ops.values())
        assert inside == pytest.approx(figures["parts_ms"]["forward"])
        assert figures["read_bytes_per_s"] > 0
        assert "scan_logits" in figures["ops"]["sample"]
        # two layers: two sums each and the embedding's; one gather of the logits
        counts = {name: ops.get(name, {}).get("calls") for name in ("all_reduce", "all_gather")}
        assert counts == (
            {"all_reduce": 5, "all_gather": 1} if ranks == 2 else dict.fromkeys(counts)
        )
        waits = {"from the stage before", "to the stage behind"}
        assert waits & set(ops) == (waits if stages == 2 else set())
    assert kinds["decode"]["parts_ms"]["detokenise"] > 0
    assert found["profile"]["read_bytes_per_s"] > 1e8


def test_prompts_for_a_model_that_sees_images_have_no_places_of_images(
    run: Run, tmp_path: Path
) -> None:
    write_vision(tmp_path)
    lengths = ("--sequences", 8, "--prompt-tokens", 200, "--new-tokens", 1, "--rounds", 1)
    status, out, _ = run("bench", tmp_path, *lengths, *CPU, "--json")
    assert status == 0
    assert json.loads(out)["tokens_per_s"][0] > 0


def test_the_table_for_people_says_what_bounds_a_decode(run: Run, bare: Path) -> None:
    status, out, _ = run("bench", bare, *SHORT, *CPU, "--profile")
    assert status == 0
    assert "generation " in out
    assert "  paged_attention " in out
    assert "of KV at " in out
    assert "memory reads at " in out
    status, out, _ = run("bench", bare, *SHORT, *CPU)
    assert len(out.splitlines()) == 3
    status, _, err = run("bench", bare, "--rounds", 0)
    assert status == 2
    assert "--rounds must be 1 or more" in err


def test_lengths_that_were_not_given_fit_the_model(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the demo's does: its checkpoint has 64 positions, what prompt and answer take each."""
    write_tiny(tmp_path, "llama", max_position_embeddings=64)
    capsys.readouterr()
    few = (*CPU, "--sequences", 2, "--rounds", 1)
    status, out, err = run("bench", tmp_path, *few, "--profile", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["prompt_tokens"], found["new_tokens"]) == (32, 32)
    assert found["profile"]["kinds"]["decode"]["steps"] == 31
    for lengths, words in (
        (("--prompt-tokens", 60), (60, 4)),
        (("--new-tokens", 60), (4, 60)),
        (("--prompt-tokens", 63, "--new-tokens", 1), (63, 1)),
    ):
        found = json.loads(run("bench", tmp_path, *few, *lengths, "--json")[1])
        assert (found["prompt_tokens"], found["new_tokens"]) == words
    status, _, err = run("bench", tmp_path, *few, "--prompt-tokens", 60, "--new-tokens", 64)
    assert status == 2
    assert "--prompt-tokens 60 and --new-tokens 64 make sequences of 124 tokens" in err
    assert "max_model_len is 64" in err


def test_after_a_profile_ops_and_engine_run_what_they_ran_before(bare: Path) -> None:
    core = EngineCore(EngineConfig(model=str(bare), device="cpu", num_threads=1, num_kv_blocks=8))
    core.start()
    try:
        before = [dict(vars(owner)) for owner in _owners(core)]
        profile = EngineProfile(core)
        profile.start(30)
        assert "_step" in vars(core.loop)
        assert summary(profile.stop(30))["kinds"] == {}  # nothing ran
        assert [dict(vars(owner)).keys() for owner in _owners(core)] == [b.keys() for b in before]
        for op in (linear, rms_norm):
            assert not op._by_device  # found again at the next call, unwatched
    finally:
        core.close()


def _owners(core: EngineCore) -> list[object]:
    runner = core._executor._worker.runner  # type: ignore[union-attr]
    return [core.loop, core.scheduler, core.outputs, runner, runner.sampler]
