"""Whoever dies in the middle of an update: a named error in time, and the old version serves on."""

from __future__ import annotations

import threading
import time
from statistics import median

import psutil
import pytest
from safetensors.torch import load_file
from shared_engines import eventually
from start_engines import outcome, start, trainer_job

from rollout import Rollout, RolloutError, SamplingParams, WorkerDied
from rollout.engine.updates import turn
from rollout.errors import ChecksumMismatch, EngineBroken, SourceFailed, UpdateInProgress
from rollout.testing.faults import Fault, Faulty

BUCKET = 16 << 10  # the tiny model takes more than 20 of them
TIMEOUT = 3.0


def weights(path):
    return load_file(path / "model.safetensors")


def wait_idle(engine: Rollout, within: float) -> None:
    end = time.monotonic() + within
    while engine.weight_info().state != "idle":
        assert time.monotonic() < end, engine.weight_info().state
        time.sleep(0.02)


def test_no_step_runs_by_what_an_update_without_staging_left_torn(
    engine, fresh, checkpoints, monkeypatch
) -> None:
    """From the moment in which steps may run again the engine is known to be broken."""
    control, end = engine._async.backend.core.control, turn.Turn.end
    tokens: list[int] = []
    known: list[int] = []
    ended: list[RolloutError] = []
    release = control.release

    def released() -> None:
        time.sleep(0.2)  # for what was computed before
        known.append(len(tokens))
        release()

    def slowly(self, *args) -> None:
        time.sleep(0.5 if known else 0)
        end(self, *args)

    def read() -> None:
        try:
            for output in engine.stream([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True)):
                tokens[:] = output.outputs[0].token_ids
        except RolloutError as error:
            ended.append(error)

    def torn():
        yield from list(weights(checkpoints["b"]).items())[:5]
        raise ValueError("the trainer's own")

    monkeypatch.setattr(control, "release", released)
    monkeypatch.setattr(turn.Turn, "end", slowly)
    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: len(tokens) > 1, 20)
    with pytest.raises(SourceFailed, match="the trainer's own"):
        engine.update_weights(torn(), staging="none", timeout=20.0)
    reader.join(20)
    assert [type(error) for error in ended] == [EngineBroken]
    assert known == [len(tokens)]
    monkeypatch.undo()
    engine.update_weights(weights(checkpoints["a"]))
    assert outcome(engine) == fresh["a"]


def test_what_an_update_without_staging_overwrites_is_not_saved(engine, checkpoints, tmp_path):
    """Neither while it is half written, nor once it was left so."""
    half, go = threading.Event(), threading.Event()

    def torn():
        yield from list(weights(checkpoints["b"]).items())[:5]
        half.set()
        go.wait(20)
        raise ValueError("the trainer's own")

    def fails() -> None:
        with pytest.raises(SourceFailed, match="the trainer's own"):
            engine.update_weights(torn(), staging="none", timeout=20.0)

    trainer = threading.Thread(target=fails)
    trainer.start()
    half.wait(20)
    try:
        with pytest.raises(UpdateInProgress, match="overwrites the live weights: save once"):
            engine.save_sharded_state(tmp_path, timeout=0.2)
    finally:
        go.set()
        trainer.join(20)
    with pytest.raises(EngineBroken, match="failed midway"):
        engine.save_sharded_state(tmp_path)
    assert not list(tmp_path.iterdir())
    version = engine.update_weights(weights(checkpoints["a"])).version
    assert engine.save_sharded_state(tmp_path) == version
    assert engine.check_weights(tmp_path).equal


@pytest.fixture
def fragile(checkpoints, tmp_path):
    job = trainer_job("fsdp2", 2, checkpoints["b"], tmp_path / "job.log")
    try:
        assert None not in job.answers(180), job.log.read_text()
        yield job
    finally:
        job.close()


@pytest.mark.parametrize("transport", [pytest.param("inline", marks=pytest.mark.more), "broadcast"])
def test_a_killed_trainer_rank(engine, fresh, checkpoints, fragile, transport) -> None:
    engine.update_weights(weights(checkpoints["a"]))
    before = engine.weight_version
    sender, killed = fragile.ask(
        op="update", address=engine.address, transport=transport, timeout=TIMEOUT,
        bucket_bytes=BUCKET, die_at={"1": 12},
    )  # fmt: skip
    assert killed is None
    assert sender is not None
    assert sender["error"] in ("TransferFailed", "SourceFailed"), sender
    assert sender["seconds"] < 20
    wait_idle(engine, 20)
    assert engine.weight_version == before
    assert outcome(engine) == fresh["a"]
    assert engine.update_weights(weights(checkpoints["b"])).version == before + 1


@pytest.mark.parametrize("transport", ["broadcast", pytest.param("p2p", marks=pytest.mark.more)])
def test_a_trainer_rank_killed_at_the_commit_takes_no_receipt_from_the_others(
    engine, fresh, checkpoints, fragile, transport
) -> None:
    before = engine.weight_version
    fragile.ask(op="load", path=str(checkpoints["b"]))
    sender, killed = fragile.ask(
        op="update", address=engine.address, transport=transport, timeout=TIMEOUT,
        bucket_bytes=BUCKET, die_at_commit=1,
    )  # fmt: skip
    assert killed is None
    assert sender is not None
    assert "error" not in sender, sender
    assert sender["receipt"]["version"] == engine.weight_version == before + 1
    assert outcome(engine) == fresh["b"]


@pytest.mark.parametrize("transport", ["broadcast"])
def test_all_trainer_ranks_killed(engine, fresh, checkpoints, fragile, transport) -> None:
    engine.update_weights(weights(checkpoints["a"]))
    before = engine.weight_version
    answers = fragile.ask(
        op="update", address=engine.address, transport=transport, timeout=TIMEOUT,
        bucket_bytes=BUCKET, die_at={"0": 12, "1": 12},
    )  # fmt: skip
    assert answers == [None, None]
    wait_idle(engine, 5)
    assert engine.weight_version == before
    assert outcome(engine) == fresh["a"]
    assert engine.update_weights(weights(checkpoints["b"])).version == before + 1


@pytest.mark.parametrize("phase", ["bucket", "idle"])
def test_a_killed_engine_rank_ends_everything_by_name(checkpoints, phase) -> None:
    engine = start(checkpoints["a"], 2)
    processes = psutil.Process().children(recursive=True)
    victims = [p for p in processes if "rollout.engine" in " ".join(p.cmdline())]
    mine = sorted(victims, key=lambda p: p.create_time())[-2:]
    failures: list[BaseException] = []

    def pending() -> None:
        try:
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=400, ignore_eos=True))
        except RolloutError as error:
            failures.append(error)

    thread = threading.Thread(target=pending)
    thread.start()
    eventually(lambda: engine.metrics().running)
    started = time.monotonic()
    try:
        if phase == "bucket":
            kill = Faulty("broadcast", Fault("kill", bucket=9, pid=mine[1].pid))
            with pytest.raises(WorkerDied, match="rank"):
                engine.update_weights(
                    weights(checkpoints["b"]),
                    transport=kill,
                    bucket_bytes=BUCKET,
                    timeout=TIMEOUT,
                )
        else:
            mine[1].kill()
        thread.join(25)
        assert not thread.is_alive()
        assert time.monotonic() - started < 25
        assert [type(f) for f in failures] == [WorkerDied]
        with pytest.raises(WorkerDied):
            engine.generate([[1, 2, 3]])
    finally:
        engine.shutdown()
    _, alive = psutil.wait_procs(mine, 3)
    assert not alive


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.more), 2], ids=["tp1", "tp2"])
def test_a_failing_update_under_sixteen_streams_is_not_noticed(checkpoints, tp) -> None:
    # The streams of two runs never meet in the same batches: only so have they the same bits.
    with start(checkpoints["a"], tp, deterministic=True) as engine:
        not_noticed(engine, checkpoints)


def not_noticed(engine: Rollout, checkpoints) -> None:
    engine.update_weights(weights(checkpoints["a"]))
    before = engine.weight_version

    def disturb() -> None:
        for transport in ("inline", "broadcast"):
            with pytest.raises(ChecksumMismatch):
                engine.update_weights(
                    weights(checkpoints["b"]),
                    transport=Faulty(transport, Fault("flip", bucket=8, bit=99)),
                    bucket_bytes=BUCKET,
                )

    # Alternated, and medians: one gap may be the machine's own.
    quiet_gaps, gaps = [], []
    for _ in range(3):
        quiet_tokens, gap = run_streams(engine, lambda: None)
        quiet_gaps.append(gap)
        tokens, gap = run_streams(engine, disturb)
        gaps.append(gap)
        for i, (x, y) in enumerate(zip(tokens, quiet_tokens, strict=True)):
            assert x == y, (i, next(j for j in range(150) if x[j] != y[j]))
    assert engine.weight_version == before
    assert median(gaps) <= 2 * median(quiet_gaps) + 0.05, (gaps, quiet_gaps)


def run_streams(engine: Rollout, beside) -> tuple[list[list[int]], float]:
    """Tokens of 16 seeded streams and the largest gap between two tokens of one of them."""
    engine.reset_prefix_cache()
    tokens: list[list[int]] = [[] for _ in range(16)]
    gaps = [0.0] * 16
    errors: list[BaseException] = []
    flowing = threading.Barrier(17)

    def stream(index: int) -> None:
        params = SamplingParams(seed=index, max_tokens=150, ignore_eos=True)
        last = None
        try:
            for output in engine.stream([index + 1, 5, 9], params):
                now = time.perf_counter()
                if last is not None:
                    gaps[index] = max(gaps[index], now - last)
                elif flowing.n_waiting < 17:
                    flowing.wait(60)
                    now = time.perf_counter()
                last = now
                tokens[index] = output.outputs[0].token_ids
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    flowing.wait(60)
    beside()
    assert any(thread.is_alive() for thread in threads), "the disturbance came too late"
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    assert all(len(row) == 150 for row in tokens)
    return tokens, max(gaps)
