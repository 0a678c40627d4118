"""An engine over the toy model that leaves no thread behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_core.harness import Start
from engine_core.toy_model import ToyExecutor, write_config
from tiny_models import make_tokenizer

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.engine.worker.job_thread import JobThread


@pytest.fixture(params=[False, True], ids=["in_turn", "ahead"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts engines; the same tests hold where the ranks get a step while one runs."""
    engines: list[EngineCore] = []

    def make(
        toy: ToyExecutor | None = None, tokenizer: bool = False, **settings: Any
    ) -> EngineCore:
        toy = toy or ToyExecutor()
        if request.param:
            toy.thread = JobThread("toy-rank")
        fields = {"vocab_size": 320} if tokenizer else {}
        path = write_config(tmp_path, **fields)
        if tokenizer:
            make_tokenizer(320).save_pretrained(path)
        values = {"num_kv_blocks": 80, "block_size": toy.block_size, **settings}
        values.setdefault("async_scheduling", request.param)
        core = EngineCore(EngineConfig(model=path, **values), executor=toy)
        engines.append(core)
        core.start()
        return core

    before = set(threading.enumerate())
    yield make
    for core in engines:
        core.close()
        core.close()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
