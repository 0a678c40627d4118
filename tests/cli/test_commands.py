"""The commands doing their work, on tiny models."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from serving import alive, descendants, serve
from tiny_models import write_tiny

from rollout import RequestOutput, Rollout, SamplingParams
from rollout.cli.flags import ENGINE_FLAGS, engine_config, engine_flags
from rollout.cli.main import make_parser
from rollout.cli.service import Up, _until, run_service
from rollout.config import EngineConfig
from rollout.errors import EngineClosed, VersionConflict, WeightMismatch, WorkerDied

Run = Callable[..., tuple[int, str, str]]
CPU = ("--device", "cpu", "--num-threads", "1")


@contextmanager
def under_way(engine: Rollout) -> Iterator[Future[list[RequestOutput]]]:
    """A call that has begun and does not end: generation stands still."""
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, [[1, 2, 3]] * 4, params)
        while not engine.metrics().running:
            time.sleep(0.001)
        engine.pause_generation("keep")
        assert not call.done()
        yield call


@contextmanager
def unwritten(folder: Path) -> Iterator[None]:
    """Which may not be written, and is afterwards what it was (root may write all the same)."""

    def found() -> dict[Path, tuple[int, int]]:
        each = {path: path.stat() for path in (folder, *folder.rglob("*"))}
        return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in each.items()}

    before, modes = found(), {path: path.stat().st_mode for path in found()}
    try:
        for path, mode in modes.items():
            path.chmod(mode & 0o555)
        yield
        assert found() == before
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def test_every_engine_setting_has_a_flag() -> None:
    names = {f.name for f in fields(EngineConfig)} - {"model"}
    assert names == {f.name for f in ENGINE_FLAGS}
    args = make_parser().parse_known(
        ["serve", "m", "--weight-dir", "a", "--weight-dir", "b", "--no-enable-prefix-caching"]
    )
    config = engine_config(args, model=args.model)
    assert config.weight_dirs == ("a", "b")
    assert not config.enable_prefix_caching
    assert config.block_size == EngineConfig(model="m").block_size


def test_the_flags_that_engines_of_a_fleet_are_started_with_say_every_setting() -> None:
    given: dict[str, object] = {
        "hf_overrides": {"rope_theta": 5.0, "text_config": {"num_hidden_layers": 1}},
        "components": {"draft": "a=b"},
        "weight_dirs": ("a", "b"),
        "cuda_graph_sizes": (1, 4),
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "trust_remote_code": True,
        "max_staleness": 0,
        "seed": -5,
        "timeout": 0.5,
        "tokenizer": "a b",
    }
    config = EngineConfig(model="m", **given)  # type: ignore[arg-type]
    args = make_parser().parse_known(["serve", "m", *engine_flags(config)])
    assert engine_config(args, model="m") == config


def test_check_tells_what_serving_would_need(run: Run, tiny: Path) -> None:
    status, out, err = run("check", tiny, "--tensor-parallel-size", 2, "--dtype", "float32")
    assert (status, err) == (0, "")
    facts = dict(line.split(None, 1) for line in out.splitlines())
    assert facts["architecture"].startswith("Qwen3ForCausalLM")
    assert facts["ranks"].startswith("2, float32")
    assert {"checkpoint", "tokenizer", "memory", "sequences", "kernels"} <= set(facts)
    assert "undo='shadow' takes nothing more" in facts["memory"]
    assert " <- " not in out
    _, out, _ = run("check", tiny, "--tensor-parallel-size", 2, "--print-shapes")
    layer = "model.layers.0.self_attn"
    assert (
        f"rank 1: {layer}.qkv_proj.weight [64, 64] float32 <- {layer}.q_proj.weight[32:64, 0:64], "
        f"{layer}.k_proj.weight[16:32, 0:64], {layer}.v_proj.weight[16:32, 0:64]"
    ) in out.splitlines()
    _, out, _ = run("check", tiny, "--undo", "sparse")
    assert "undo='sparse' takes" in out
    _, out, _ = run("check", tiny, "--max-adapters", 2)
    assert "MiB of slots for adapters" in out


def test_check_tells_of_a_score_head(run: Run, tmp_path: Path) -> None:
    write_tiny(tmp_path, labels=1)
    status, out, _ = run("check", tmp_path, "--task", "reward")
    assert status == 0
    facts = dict(line.split(None, 1) for line in out.splitlines())
    assert facts["architecture"].startswith("Qwen3ForSequenceClassification")
    assert facts["served"].startswith("natively, to classify: a score head of 1 label")
    status, _, err = run("check", tmp_path, "--task", "generate")
    assert (status, "architecture ends in ForCausalLM" in err) == (2, True)


def test_generate_writes_the_same_twice_and_as_json(run: Run, tiny: Path) -> None:
    asked = ("generate", tiny, "Hello", "--temperature", 0, "--max-tokens", 6, *CPU)
    status, out, _ = run(*asked)
    again, as_json, _ = run(*asked, "--json")
    assert (status, again) == (0, 0)
    row = json.loads(as_json)
    assert row["text"] + "\n" == out
    assert row["prompt"] == "Hello"
    assert len(row["token_ids"]) == len(row["logprobs"]) <= 6


def test_a_debug_log_is_ours_and_not_that_of_libraries(run: Run, tiny: Path) -> None:
    assert run("check", tiny, "--device", "cpu", "--log-level", "debug")[0] == 0
    assert logging.getLogger("rollout.engine.core").isEnabledFor(logging.DEBUG)
    for library in ("grpc", "asyncio", "uvicorn", "httpx"):
        assert not logging.getLogger(library).isEnabledFor(logging.INFO)


def test_prompts_may_follow_flags(run: Run, bare: Path) -> None:
    words = make_parser().parse_known(["generate", "M", "a", "--max-tokens", "4", "b", "--", "-c"])
    assert words.words == ["M", "a", "b", "-c"]
    assert make_parser().parse_known(["generate", "--n", "2", "M", "a"]).words == ["M", "a"]
    status, _, err = run("generate", bare, "a", "--n", 1, "b", "--maxtokens", 4)
    assert status == 2
    assert "unknown argument --maxtokens; did you mean --max-tokens?" in err


def test_a_service_answers_generate_and_info_and_ends_cleanly(run: Run, bare: Path) -> None:
    """Under the flags that users of vLLM know, from a directory into which nothing is written."""
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32", "--undo", "host")
    flags += ("--served-model-name", "mine", "--trust-remote-code")
    with unwritten(bare), serve(f"--model={bare}", *flags, forked=False) as served:
        with urllib.request.urlopen(f"http://{served.http}/v1/models", timeout=30) as reply:
            assert [card["id"] for card in json.load(reply)["data"]] == ["mine"]
        ranks = descendants(served.process.pid)
        assert len(ranks) >= 2
        asked = ("--token-ids", "1,2,3", "--max-tokens", 4, "--temperature", 0, "--json")
        status, out, _ = run("generate", "--connect", served.grpc, *asked)
        assert status == 0
        row = json.loads(out)
        assert len(row["token_ids"]) == 4
        assert row["weight_versions"] == [[0, 0, 4]]
        _, out, _ = run("info", served.grpc, "--json")
        facts = json.loads(out)
        assert (facts["ranks"], facts["version"], facts["state"]) == (2, 0, "running")
        assert row["epoch"] == facts["epoch"]
        assert facts["tokens_generated"] == 4
        assert facts["receipts"] == []
        assert facts["undo"] == "host"
        assert facts["memory"]["undo"] == facts["memory"]["weights"] > 0
        _, out, _ = run("info", served.grpc)
        assert f"{facts['epoch']}" in out
        assert "memory            weights " in out
        with Rollout.connect(served.grpc) as engine, under_way(engine) as running:
            served.process.send_signal(signal.SIGINT)
            with pytest.raises(EngineClosed):  # and no samples cut short that look like good ones
                running.result(30)
        assert served.process.wait(60) == 0
        assert served.process.stdout is not None
        assert served.process.stdout.read() == ""  # the ready line was all
        assert served.process.stderr is not None
        assert "undo='host' takes" in served.process.stderr.read()
    gone_by(time.monotonic() + 5, ranks)


def test_a_rank_that_dies_ends_the_service_and_the_log_says_what_happened(bare: Path) -> None:
    flags = ("--tensor-parallel-size", "2", "--log-level", "info", "--patience", "0.5")
    with serve(bare, *flags, forked=False) as served:
        with Rollout.connect(served.grpc) as engine:
            engine.update_weights(bare, label="first")
            with pytest.raises(WeightMismatch):
                engine.update_weights({"no.such": torch.zeros(2)})
            with pytest.raises(VersionConflict):
                engine.update_weights(bare, version=1)
            engine.rollback()
            rank = min(descendants(served.process.pid))
            with under_way(engine) as running:
                os.kill(rank, signal.SIGKILL)
                with pytest.raises(WorkerDied, match=f"pid {rank}.*SIGKILL"):
                    running.result(30)
            with pytest.raises(WorkerDied):  # for a while it says so to who comes late, too
                engine.generate([1, 2, 3])
        assert served.process.wait(30) == 1
        assert served.process.stderr is not None
        told = served.process.stderr.read()
    for line in (
        r"WARNING +rollout.*: --patience: of several engines",
        r"INFO +rollout.*: update \w+ begins: version 1, by \w+, full, staging=auto",
        r"INFO +rollout.*: version 1 is live: \w+, \d+ tensors by \w+, stalled",
        r"WARNING +rollout.*: .* (was refused|failed), version 1 serves on: .*no\.such",
        r"WARNING +rollout.*: update \w+ was refused, version 1 serves on: version 1 is not above",
        r"INFO +rollout.*: version 2 is live: rolled back, ",
        rf"ERROR +rollout.*: rank . \(pid {rank}\) ended by signal SIGKILL.*version 2 was live",
        r"ERROR +rollout.*: ending in 5 s with status 1 \(--on-death exit\)",
    ):
        assert re.search(line, told), f"{line} is not in\n{told}"


async def test_on_death_serve_waits_for_a_signal_alone() -> None:
    stop, died = asyncio.Event(), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(_until(stop, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    stop.set()
    assert await waiting == 0
    died.set_result(WorkerDied("rank 0"))
    assert await _until(stop, died) == 1  # a signal does not hide the death


def test_standard_output_has_the_ready_line_and_nothing_else(capsys) -> None:
    """Ray, for one, prints there what its cluster says, before the line and after it."""

    @asynccontextmanager
    async def service() -> AsyncIterator[Up]:
        print("(autoscaler +1s) Resized to 2 CPUs.")
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        yield Up("h:1", "h:2", SimpleNamespace(leave=lambda: None))
        print("(autoscaler +9s) Removing 1 nodes of type worker (idle).")

    args = Namespace(exit_with_stdin=False, shutdown_timeout=0.0)
    try:
        assert asyncio.run(run_service(args, service())) == 0
    finally:
        gc.unfreeze()
    print("afterwards")
    out, err = capsys.readouterr()
    assert out == "ready http=h:1 grpc=h:2\nafterwards\n"
    assert err.count("(autoscaler +") == 2


def test_check_against_names_what_differs_and_info_shows_the_receipts(run, bare, tmp_path) -> None:
    write_tiny(tmp_path, "llama", seed=1)
    with serve(bare, "--dtype", "float32") as served:
        status, out, _ = run("check", "--against", bare, served.grpc)
        assert status == 0
        assert out.startswith("weights equal: kernels differ")
        status, out, _ = run("check", "--against", tmp_path, served.grpc)
        assert status == 1
        assert out.startswith("weights differ: ")
        named = [line for line in out.splitlines() if line.startswith("  ")]
        assert len(named) == 9
        assert "more; --all names them" in named[-1]
        assert "an update to them: about " in out
        whole = run("check", "--against", tmp_path, served.grpc, "--all")[1].splitlines()
        assert len([line for line in whole if line.startswith("  ")]) > 9
        assert not any("more; --all" in line for line in whole)
        with Rollout.connect(served.grpc) as engine:
            sent = [engine.update_weights(tmp_path), engine.update_weights(bare, label="back")]
            kept = engine.receipts()
        assert [(r.version, r.digest, r.update_id) for r in kept] == [
            (r.version, r.digest, r.update_id) for r in sent
        ]
        status, _, _ = run("check", "--against", bare, served.grpc)
        assert status == 0
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "pytorch_model.bin").write_bytes(b"\x80\x02no pickle of ours")
        status, out, error = run("check", "--against", tmp_path / "broken", served.grpc)
        assert (status, out) == (2, "")
        assert "pytorch_model.bin" in error
        assert "Traceback" not in error
        _, out, _ = run("info", served.grpc, "--receipts", 1, "--json")
        (last,) = json.loads(out)["receipts"]
        assert (last["version"], last["digest"]) == (2, sent[1].digest)
        _, out, _ = run("info", served.grpc)
        assert f"v1 digest {sent[0].digest:016x} " in out
        assert re.search(r"^task +generate\s*$", out, re.MULTILINE)
        assert re.search(r"^members +none: one engine\s*$", out, re.MULTILINE)
        assert f"v2 'back' digest {sent[1].digest:016x} " in out
        with Rollout.connect(served.grpc) as engine:
            engine.update_weights(bare, label="\x1b[2J[red]end")
        status, out, _ = run("top", served.grpc, "--once", "--interval", 0.05)
        assert status == 0
        v3, v2, v1 = (line for line in out.splitlines() if re.match(r"v\d ", line))
        assert "\N{REPLACEMENT CHARACTER}[2J[red]end" in v3  # a label moves no cursor
        assert "\x1b" not in out
        for line, receipt in ((v1, sent[0]), (v2, sent[1])):
            assert line.endswith(f"{receipt.digest:016x}")
            assert "█" in line
        status, _, error = run("top", served.grpc, "--interval", 0)
        assert status == 2
        assert "--interval must lie between" in error


def test_a_service_goes_with_its_parent_even_while_it_loads(bare: Path) -> None:
    command = [sys.executable, "-m", "rollout", "serve", str(bare), "--exit-with-stdin", *CPU]
    done = subprocess.run(
        [*command, "--port", "0", "--grpc-port", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.more), signal.SIGTERM]
)
def test_a_signal_ends_a_service_that_loads_quietly(bare: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "rollout", "serve", str(bare), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--grpc-port", "0", "--tensor-parallel-size", "2", *CPU],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        # It listens for signals once it has begun to load: then its first rank appears.
        while not descendants(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        ranks_seen = descendants(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (128 + number, "", "")
    gone_by(time.monotonic() + 10, ranks_seen)


def test_an_interrupt_while_modules_are_imported_ends_the_command_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupting:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "rollout.cli.main":
                raise KeyboardInterrupt

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    run = resolve_name(project["project"]["scripts"]["rollout"])
    monkeypatch.delitem(sys.modules, "rollout.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting, *sys.meta_path])
    assert run() == 130


def gone_by(deadline: float, pids: set[int]) -> None:
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {sorted(filter(alive, pids))}"
        time.sleep(0.05)
