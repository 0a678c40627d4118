"""Settings every test runs under: one quiet thread, and ``tests/`` importable by plain names."""

import fcntl
import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# PyTorch's store asks the resolver for the name of every peer, on loopback too: one that does not
# answer costs 5 s, longer than the deadlines under test.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

gc.disable()  # until all modules are imported
torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "suite",
    deadline=None,  # a busy machine is no fault
    derandomize="ROLLOUT_TEST_RANDOM" not in os.environ,  # a soak looks for new examples
)
hypothesis.settings.load_profile("suite")

# What takes longest goes first, so that no worker ends long after the others: what `make more`
# runs, which is little in `make test`, and then the rest.
_LONGEST = (
    "test_pretended_card.py",
    "test_examples.py",
    "test_soak.py",
    "test_verl.py",
    "test_processes.py",
    "test_transformers_sweep.py",
    "test_gpu_benchmark.py",
    "test_trl_async.py",
    "test_native_targets.py",
    "test_sanitizer.py",
    "test_architectures_equal_restart.py",
    "test_ray.py",
    "test_async_fleet.py",
    "test_trl_colocate.py",
    "test_verbs.py",
    "test_clean_exits.py",
    "test_combinations.py",
    "test_failed_update_changes_nothing.py",
    "test_update_equals_restart.py",
    "test_conformance.py",
    "test_commands.py",
    "test_demo.py",
    "test_trl.py",
    "test_sleep.py",
    "test_shared_memory_group.py",
    "test_stopped_trainer.py",
    "test_around_a_commit.py",
    "test_megatron.py",
    "test_wheel.py",
    "test_compile_ahead.py",
    "test_native_build.py",
    "test_rank_faults.py",
    "test_transaction.py",
    "test_service_transports.py",
    "test_snippets.py",
    "test_fuzz_servers.py",
    "test_torch_jobs.py",
    "test_state_machine.py",
    "test_dense_parity.py",
    "test_dashboard.py",
    "test_sglang.py",
    "test_bits_on_ranks.py",
    "test_adapter_updates.py",
    "test_pinned_requests.py",
    "test_leaving.py",
    "test_partitions.py",
    "test_trainer_ops.py",
    "test_random_updates.py",
    "test_areal.py",
    "test_simulator.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Behind the longest the files of each folder are spread over the run: those of fleets mostly
    wait, and cores that run nothing else meanwhile would be idle.
    """
    if not hasattr(config, "workerinput"):  # one process, whose files may share engines
        return
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        folders.setdefault(path.parent, []).append(path)
    place = {}
    for files in folders.values():
        for index, path in enumerate(files):
            longest = _LONGEST.index(path.name) if path.name in _LONGEST else len(_LONGEST)
            place[path] = (longest, (index + 0.5) / len(files))
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What is imported by now stays: searches for garbage, a tenth of all time, pass it over."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``, for the length of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _logs_go_where_they_went() -> Iterator[None]:
    """A command that ran in this process logs to what was its stderr, which pytest closes."""
    yield
    for handler in [*logging.root.handlers]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """For files that start many engines of several ranks: see the module of that name."""
    from forked_ranks import forked_ranks

    with forked_ranks():
        yield


@pytest.fixture(scope="module")
def ray_alone() -> Iterator[None]:
    """Ray finds every cluster of its machine: jobs that start one take turns, whichever worker
    runs them.
    """
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        deadline = time.monotonic() + 900
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "other tests hold Ray for 900 s"
                time.sleep(0.2)
        yield
    finally:
        os.close(folder)
