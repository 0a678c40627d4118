"""The engine's end of the grammars waits for no start, and blames nobody for another's time."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_core.harness import PROMPT
from tiny_models import make_tokenizer

from rollout.engine.sequences.sequence import Sequence
from rollout.engine.structured import compile_queue
from rollout.engine.structured import grammar_process as child
from rollout.engine.structured import process as process_file
from rollout.engine.structured.follow_queue import FollowQueue
from rollout.engine.structured.grammars import Grammars
from rollout.engine.structured.process import GrammarProcess, Lost, ProcessLostError
from rollout.errors import EngineClosed, EngineError, EngineOverloaded, InvalidRequest
from rollout.generation import SamplingParams


def test_asking_for_a_grammar_waits_for_no_start_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_queue, "_MAX_QUEUED", 1)
    grammars, asked = Grammars("nowhere", 320, frozenset()), []
    with grammars._start_lock:
        spec = {"regex": "a"}
        thread = threading.Thread(target=lambda: asked.append(grammars.compile(spec)), daemon=True)
        thread.start()
        thread.join(10)
        assert len(asked) == 1
        while grammars._compiling._waiting:  # the thread has taken it
            time.sleep(0.001)
        grammars.compile({"regex": "b"})
        with pytest.raises(EngineOverloaded, match="grammars wait"):
            grammars.compile({"regex": "c"})
        grammars._closed = True
    with pytest.raises(EngineClosed):
        asked[0].result(10)
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("grammars") / "tokenizer"
    make_tokenizer(320).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def grammars(tokenizer: str) -> Iterator[Grammars]:
    made = Grammars(tokenizer, 320, frozenset({2}))
    yield made
    made.close()


def sequence(number: int, regex: str = "[0-9]{3}") -> Sequence:
    params = SamplingParams(structured_outputs={"regex": regex})
    return Sequence(
        seq_id=number,
        request_id=f"r{number}",
        index=0,
        params=params,
        seed=0,
        prompt_token_ids=PROMPT,
    )


def answers(
    queue: FollowQueue, sequences: list[Sequence], seconds: float = 60
) -> dict[str, object]:
    queue.ask(sequences)
    queue.wait(sequences, seconds)
    return {seq.request_id: verdict for seq, verdict in queue.take()}


@pytest.mark.more
def test_a_new_process_compiles_before_it_follows_and_nobody_pays_for_the_old_one(
    grammars: Grammars,
) -> None:
    first, second = sequence(1), sequence(2, "[a-c]+")
    before = answers(grammars.followed, [first, second])
    os.kill(grammars._process._process.pid, signal.SIGKILL)
    after = answers(grammars.followed, [first, second])
    assert before.keys() == after.keys() == {"r1", "r2"}
    for name, mask in before.items():
        assert mask.any()
        assert (after[name] == mask).all()


class LostAgain:
    """A process that is lost whenever it is asked about ``guilty``."""

    def __init__(self, guilty: int, why: Lost, compiling: bool = False) -> None:
        self.known, self.told, self.asked = {}, {}, []
        self.guilty, self.why, self.compiling = guilty, why, compiling

    def masks(self, rows: list[dict], forget: list[int]) -> object:
        numbers = [row["sequence"] for row in rows]
        self.asked.append(numbers)
        if self.guilty in numbers:
            raise ProcessLostError(self.why, numbers.index(self.guilty), self.compiling)
        masks = SimpleNamespace(numpy=lambda: [f"mask of {number}" for number in numbers])
        return [child.FOLLOWS] * len(rows), masks


@pytest.mark.parametrize(
    ("why", "kind", "words"),
    [
        (Lost.ENDED, InvalidRequest, "of request 'r2' ended the process"),
        (Lost.HUNG, EngineError, "of request 'r2' .*was stopped twice"),
        (Lost.SLOW_ROW, InvalidRequest, "of request 'r2' .*too ambiguous"),
    ],
)
def test_only_the_request_under_way_is_blamed_and_by_name(
    why: Lost, kind: type[Exception], words: str
) -> None:
    process = LostAgain(2, why)
    queue = FollowQueue(lambda: process, None, lambda: None)
    sequences = [sequence(1), sequence(2), sequence(3)]
    process.told = {1: 0, 2: 0, 3: 0}
    found = answers(queue, sequences)
    queue.close()
    assert found["r1"] == "mask of 1"
    assert found["r3"] == "mask of 3"
    with pytest.raises(kind, match=words):
        raise found["r2"]
    # The second time it was alone, so that nobody else was asked for again.
    assert process.asked[0] == [1, 2, 3]
    assert process.asked[1:] == [[1, 3]] if why is Lost.SLOW_ROW else [[1, 3], [2]]


def test_nobody_is_blamed_while_a_grammar_is_compiled_but_all_hear_in_the_end() -> None:
    process = LostAgain(2, Lost.ENDED, compiling=True)
    queue = FollowQueue(lambda: process, None, lambda: None)
    process.told = {2: 0}
    with pytest.raises(EngineError, match="lost 6 times in a row"):
        raise answers(queue, [sequence(2)])["r2"]
    queue.close()


@pytest.mark.more
def test_a_grammar_whose_compiler_hangs_is_compiled_by_another(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_file, "HANG_LIMIT", 0.5)
    made = Grammars(tokenizer, 320, frozenset({2}))
    made.compile({"regex": "a"}).result(60)
    process: GrammarProcess = made._process
    os.kill(process._process.pid, signal.SIGSTOP)
    made.compile({"regex": "b"}).result(60)
    assert made._process is not process
    assert not Path(f"/proc/{process._process.pid}").exists()
    made.close()
