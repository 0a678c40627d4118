"""Tiny checkpoints, and the command line run in this process with its log set-up undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import write_tiny

from rollout.cli.main import main

Run = Callable[..., tuple[int, str, str]]  # arguments -> exit status, stdout, stderr


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 with a tokenizer."""
    path: Path = tmp_path_factory.mktemp("cli") / "tiny"
    write_tiny(path, "qwen3", tokenizer=True)
    return path


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama without a tokenizer."""
    path: Path = tmp_path_factory.mktemp("cli") / "bare"
    write_tiny(path, "llama")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    root, ours = logging.getLogger(), logging.getLogger("rollout")
    handlers, level, our_level = list(root.handlers), root.level, ours.level

    def call(*argv: object) -> tuple[int, str, str]:
        status = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return status, out, err

    yield call
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
