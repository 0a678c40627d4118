"""The engine's end of the grammars waits for no start, and blames nobody for another's time."""

from __future__ import annotations

import mmap
import threading
import time
from types import SimpleNamespace

import pytest

from rollout.engine.structured import __main__ as child
from rollout.engine.structured import grammars as parent
from rollout.engine.structured.grammars import Grammars
from rollout.errors import EngineClosed, EngineOverloaded


def test_asking_for_a_grammar_waits_for_no_start_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent, "_MAX_QUEUED", 1)
    grammars, asked = Grammars("nowhere", 320, frozenset()), []
    with grammars._starting:
        spec = {"regex": "a"}
        thread = threading.Thread(target=lambda: asked.append(grammars.compile(spec)), daemon=True)
        thread.start()
        thread.join(10)
        assert len(asked) == 1
        with pytest.raises(EngineOverloaded, match="grammars wait"):
            grammars.compile({"regex": "b"})
        grammars._closed = True
    with pytest.raises(EngineClosed):
        asked[0].result(10)
    grammars.close()


def test_a_new_process_knows_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: object) -> SimpleNamespace:
        return SimpleNamespace(alive=True, close=lambda: None)

    monkeypatch.setattr(parent, "GrammarProcess", made)
    grammars = Grammars("nowhere", 320, frozenset())
    first = grammars._running()
    grammars._known["a"] = None
    assert grammars._running() is first
    assert "a" in grammars._known
    first.alive = False
    assert grammars._running() is not first
    assert not grammars._known
    grammars.close()


def test_compiling_takes_none_of_a_sequences_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_SECONDS", 0.05)

    def matcher(spec: object) -> SimpleNamespace:
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        return SimpleNamespace(is_terminated=lambda: False, fill_next_token_bitmask=lambda m: None)

    compiler = SimpleNamespace(vocab_size=320, mask_width=10, matcher=matcher)
    with mmap.mmap(-1, mmap.PAGESIZE) as progress:
        follower = child.Follower(compiler, progress)
        states, _ = follower.step([{"sequence": 1, "tokens": [], "spec": {}}], [])
    assert states == [child.FOLLOWS]
