"""Ranks that fail, die or hang: a named error in time, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_exec.drive_executor import children, config, generate, running, wait_until
from engine_exec.sampling import sequence
from safetensors.torch import load_file, save_file

from rollout.engine.executors import make_executor
from rollout.engine.executors.multiprocess import MultiprocessExecutor
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    WeightMismatch,
    WorkerDied,
)
from rollout.generation import SamplingParams

pytestmark = pytest.mark.usefixtures("nothing_left_here")


def pids(executor):
    return [f.result(10)[0]["pid"] for f in executor.call("info", {})]


def test_a_killed_rank_fails_everything_at_once_and_takes_the_others_along(tiny):
    deaths = []
    with running(tiny[0], executor="multiprocess", tensor_parallel_size=2) as executor:
        executor.on_death = deaths.append
        ranks = pids(executor)
        os.kill(ranks[0], signal.SIGSTOP)  # so that rank 1 waits inside a collective
        pending = executor.call("digests", {}) + step_futures(executor)
        time.sleep(0.2)
        started = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        errors = [f.exception(25) for f in pending if f.exception(25) is not None]
        assert time.monotonic() - started < 25
        assert len(errors) >= 3  # rank 1 may have answered the first call
        for error in errors:
            assert isinstance(error, WorkerDied)
            assert f"rank 1 (pid {ranks[1]}) ended by signal SIGKILL" in str(error)
        wait_until(lambda: deaths)
        assert len(deaths) == 1
        for future in executor.call("info", {}):
            with pytest.raises(WorkerDied, match="rank 1"):
                future.result(1)
        wait_until(lambda: not alive(ranks))


def step_futures(executor):
    from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry
    from rollout.engine.steps.batch import encode_batch

    batch = ScheduledBatch([ScheduledEntry(sequence(SamplingParams(), computed=0), 3)])
    return executor.call("step", *encode_batch(batch, 4))


def alive(pids):
    def running_state(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if running_state(pid)]


def test_a_step_that_fails_on_one_rank_ends_the_engine_with_its_cause(tiny):
    with running(tiny[0], executor="multiprocess", tensor_parallel_size=2) as executor:
        from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry
        from rollout.engine.steps.batch import encode_batch

        batch = ScheduledBatch([ScheduledEntry(sequence(SamplingParams(), computed=0), 3)])
        args, tensors = encode_batch(batch, 4)
        del tensors["slot_mapping"]
        started = time.monotonic()
        for future in executor.call("step", args, tensors):
            with pytest.raises(
                WorkerDied, match=r"ended with exit code 1 after TypeError: .*'slot_mapping'"
            ):
                future.result(25)
        assert time.monotonic() - started < 25


def test_an_internal_error_of_one_call_does_not_hold_up_the_replies_behind_it(tiny):
    with running(tiny[0], executor="multiprocess") as executor:
        started = time.monotonic()
        bad = executor.call("init_kv", {"num_blocks": "many"})[0]
        good = executor.call("info", {})[0]
        with pytest.raises(Exception, match=r"many|str"):
            bad.result(25)
        good.result(25)
        assert time.monotonic() - started < 25


def test_ranks_print_no_stack_frames_hear_no_ctrl_c_and_get_no_tokens(tiny, monkeypatch):
    tokens = ("ROLLOUT_TOKEN", "ROLLOUT_CONTROL_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    for name in tokens:
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")  # as Ray does
    with running(tiny[0], executor="multiprocess") as executor:
        pid = executor._links[0].process.pid
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        lines = environment.split(b"\0")
        assert b"TORCH_CPP_LOG_LEVEL=ERROR" in lines
        assert b"TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in lines
        assert b"NCCL_ASYNC_ERROR_HANDLING=1" not in lines
        assert f"ROLLOUT_INSTANCE_ID={executor.instance}".encode() in lines
        assert b"a-secret" not in environment
        assert os.getpgid(pid) != os.getpgid(0)


def test_an_executor_closed_before_its_ranks_start_starts_none(tiny):
    executor = MultiprocessExecutor(config(tiny[0], tensor_parallel_size=2))
    executor.close()
    with pytest.raises(EngineClosed):
        executor.start()
    assert executor._links == []


def test_a_rank_that_cannot_load_fails_start_with_its_own_error(tiny, tmp_path):
    for file in tiny[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    executor = MultiprocessExecutor(config(tmp_path, tensor_parallel_size=2))
    with pytest.raises(WeightMismatch, match=r"rank [01]: .*model\.norm\.weight") as caught:
        executor.start()
    [note] = caught.value.__notes__  # with its traceback, there
    assert note.startswith("On rank ")
    assert "in load_weights" in note
    assert executor._links[0].process.poll() is not None


def test_a_missing_checkpoint_is_a_config_error(tmp_path):
    for kind in ("inline", "multiprocess"):
        executor = make_executor(config(tmp_path, executor=kind))
        with pytest.raises(ConfigError, match=r"config\.json"):
            executor.start()
        executor.close()


def test_start_ends_at_its_deadline(tiny):
    executor = make_executor(config(tiny[0], executor="multiprocess", start_timeout=0.05))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"rank 0 did not load .* \(phase: start\)"):
        executor.start()
    assert time.monotonic() - started < 25


def test_closing_is_quick_even_when_a_rank_hangs(tiny):
    with running(tiny[0], executor="multiprocess", tensor_parallel_size=2) as executor:
        os.kill(pids(executor)[1], signal.SIGSTOP)
        # More than a socket holds: the call must not wait for the rank that hangs.
        started = time.monotonic()
        big = {"payload": torch.zeros(8 << 20, dtype=torch.uint8)}
        futures = executor.call("dance", {}, big) + executor.call("info", {})
        assert time.monotonic() - started < 25
        executor.close()
        assert time.monotonic() - started < 25
        assert isinstance(futures[-1].exception(1), EngineClosed)
        executor.close()
        with pytest.raises(EngineClosed):
            executor.call("info", {})[0].result(1)


ORPHAN = """
import os, sys, json, time
sys.path.insert(0, {tests!r})
from engine_exec.drive_executor import running
with running({model!r}, executor="multiprocess", tensor_parallel_size=2) as executor:
    ranks = [f.result(10)[0]["pid"] for f in executor.call("info", {{}})]
    child = os.fork()
    if child:
        print(json.dumps([ranks, child]), flush=True)
    time.sleep(60)
    os._exit(0)
"""


def test_ranks_end_when_their_engine_is_killed_whose_forked_processes_go_on(tiny):
    script = ORPHAN.format(tests=str(Path(__file__).parent.parent), model=str(tiny[0]))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        ranks, child = json.loads(parent.stdout.readline())
        try:
            assert len(alive(ranks)) == 2
            parent.kill()
            wait_until(lambda: not alive(ranks), 2)
            assert alive([child])
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_inline_engine_leaves_no_process_and_refuses_calls_once_closed(tiny):
    before = children()
    with running(tiny[0], executor="inline") as executor:
        assert generate(executor, [[1, 2, 3]], 2)[0].output_len == 2
        assert children() == before
    with pytest.raises(EngineClosed):
        executor.call("info", {})[0].result(1)
