"""Outputs that follow a grammar, in process and over gRPC: what they may be, and what ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import alive, descendants
from shared_engines import eventually
from tiny_models import write_tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rollout import Rollout, SamplingParams
from rollout.errors import InvalidRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["name", "size"],
}
AMBIGUOUS = {"regex": "((a*)*)*b"}  # the sixth hundred of tokens takes minutes


@pytest.fixture(scope="module")
def strangers() -> set[int]:
    """What follows grammars for engines of other files, in this same process."""
    return _processes()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, strangers: set[int]) -> Iterator[Rollout]:
    model = tmp_path_factory.mktemp("structured") / "tiny"
    write_tiny(model, "qwen3", tokenizer=True)
    with Rollout(str(model), device="cpu", dtype="float32", num_threads=1) as made:
        yield made


def texts(face: Rollout, grammar: dict[str, Any] | None, **params: Any) -> list[str]:
    """Of samples that all ended by themselves."""
    asked = {"max_tokens": 200, "temperature": 1.0, "seed": 3, **params}
    outputs = face.generate("Hello", {**asked, "structured_outputs": grammar})[0].outputs
    assert [(o.finish_reason, o.stop_reason) for o in outputs] == [("stop", None)] * len(outputs)
    return [output.text for output in outputs]


GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["yes", "no", 'it "depends"']}, 'yes|no|it "depends"'),
    ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    ({"grammar": 'root ::= "x" [0-9]+ "y"'}, "x[0-9]+y"),
    ({"json": SCHEMA, "disable_any_whitespace": True}, r"\{.*\}"),
    ({"json": json.dumps(SCHEMA)}, r"(?s)\{.*\}"),
    (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "regex", "pattern": "[ab]{4}"},
            }
        },
        "[ab]{4}",
    ),
]


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_every_sample_follows_its_grammar(
    engine: Rollout, grammar: dict[str, Any], pattern: str
) -> None:
    for text in texts(engine, grammar, n=4):
        assert re.fullmatch(pattern, text)
        if "json" in grammar:
            found = json.loads(text)
            assert found["name"] in ("a", "b")
            assert 1 <= found["size"] <= 20


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_without_an_end_token_a_sample_ends_with_its_grammar(
    engine: Rollout, skip_special_tokens: bool
) -> None:
    asked = {"ignore_eos": True, "skip_special_tokens": skip_special_tokens}
    assert texts(engine, {"choice": ["no"]}, **asked) == ["no"]
    assert texts(engine, {"choice": ["no"]}, stop=["never"], **asked) == ["no"]


def test_rows_with_grammars_beside_others_change_nothing_for_these(engine: Rollout) -> None:
    plain = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    alone = engine.generate("Hello", plain)[0].outputs[0].token_ids
    bound = SamplingParams(max_tokens=12, seed=6, structured_outputs={"regex": "[0-9]{8}"})
    together = engine.generate(["Hello"] * 3, [bound, plain, bound])
    assert together[1].outputs[0].token_ids == alone
    assert all(re.fullmatch("[0-9]{8}", together[i].outputs[0].text) for i in (0, 2))


def test_logprobs_are_those_of_the_tokens_that_the_grammar_left(engine: Rollout) -> None:
    asked = {"max_tokens": 1, "seed": 1, "structured_outputs": {"choice": ["a"]}}
    [token] = engine.generate("Hello", asked)[0].outputs
    assert token.logprobs.processed == [0.0]  # nothing else was left
    assert token.logprobs.raw[0] < 0.0


def test_it_is_the_same_over_grpc(engine: Rollout) -> None:
    with Rollout.connect(engine.address) as client:
        grammar = {"regex": "[0-9]{3}"}
        assert texts(client, grammar, n=2) == texts(engine, grammar, n=2)
        with pytest.raises(InvalidRequest, match="parenthesis is not closed"):
            texts(client, {"regex": "(a"})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "cannot be compiled.*parenthesis is not closed"),
    ({"grammar": "root ::= x"}, 'cannot be compiled.*"x" is not defined'),
    ({"json": {"type": "nothing"}}, "cannot be compiled.*nothing"),
    ({"json": "{"}, "be JSON"),
    ({"regexp": "a"}, "one of json, regex"),
    ({"regex": "a", "choice": ["a"]}, "one of json, regex"),
    ({"choice": []}, "another value for 'choice'"),
    ({"regex": "a" * 70000}, "at most 65536 characters"),
    ({"json": json.loads('{"items":' * 100 + "{}" + "}" * 100)}, "nested at most 64"),
]


@pytest.mark.parametrize(("grammar", "words"), BAD)
def test_what_is_no_grammar_is_refused_with_the_reason(
    engine: Rollout, grammar: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        texts(engine, grammar)


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens cannot be combined"):
        SamplingParams(min_tokens=2, structured_outputs={"choice": ["a"]})


def test_a_grammar_that_takes_too_long_ends_its_own_request_alone(engine: Rollout) -> None:
    only_a = engine.tokenize("a")
    slow = {"max_tokens": 500, "allowed_token_ids": only_a, "structured_outputs": AMBIGUOUS}
    others = {"max_tokens": 300, "ignore_eos": True, "seed": 1}
    before = engine.generate("Hello", others)[0].outputs[0].token_ids
    found: list[list[int]] = []

    def beside() -> None:
        found.append(engine.generate("Hello", others)[0].outputs[0].token_ids)

    thread = threading.Thread(target=beside)
    thread.start()
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        engine.generate("Hello", slow)
    thread.join(60)
    assert found == [before]
    assert texts(engine, {"choice": ["no"]}) == ["no"]


@pytest.mark.parametrize(
    "sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.more)]
)
def test_while_the_process_is_replaced_the_others_go_on_and_nobody_is_blamed(
    engine: Rollout, strangers: set[int], sent: signal.Signals
) -> None:
    others = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
    asked = SamplingParams(max_tokens=400, seed=4, structured_outputs={"regex": "[0-9]{200}"})
    expected = engine.generate("Hello", others)[0].outputs[0].token_ids
    bound = engine.stream("Hello", asked)
    assert next(bound).outputs[0].text
    process = _process(strangers)
    os.kill(process, sent)
    [beside] = engine.generate("Hello", others)
    assert beside.outputs[0].token_ids == expected
    assert process in _processes() - strangers or sent is signal.SIGKILL  # it has not been replaced
    *_, last = bound
    assert re.fullmatch("[0-9]{200}", last.outputs[0].text)
    assert process not in _processes()
    assert texts(engine, {"choice": ["no"]}) == ["no"]


ORPHAN = """
import os, sys, time
from rollout import Rollout
with Rollout(sys.argv[1], device="cpu", dtype="float32", num_threads=1) as made:
    made.generate("Hello", {"max_tokens": 2, "structured_outputs": {"choice": ["no"]}})
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
    os._exit(0)
"""


def test_the_process_ends_with_a_killed_engine_whose_forked_processes_go_on(
    engine: Rollout,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ORPHAN, engine.server_info().model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            [process] = (p for p in descendants(parent.pid) if "engine.structured" in _command(p))
            parent.kill()
            eventually(lambda: not alive(process), 10)
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def _process(strangers: set[int]) -> int:
    """The one that follows grammars for this file's engine."""
    (found,) = _processes() - strangers
    return found


def _processes() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if "engine.structured" in _command(pid)}


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text() if alive(pid) else ""


@pytest.mark.more
def test_ranks_that_share_a_model_follow_the_same_grammars(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    settings = {"device": "cpu", "dtype": "float32", "num_threads": 1, "async_scheduling": True}
    with Rollout(str(tmp_path / "tiny"), tensor_parallel_size=2, **settings) as two:
        for text in texts(two, {"regex": "[0-9]{40}"}, n=4):
            assert re.fullmatch("[0-9]{40}", text)


def test_bad_words_do_not_come_but_their_parts_may(engine: Rollout) -> None:
    asked = {"temperature": 0.0, "max_tokens": 12, "allowed_token_ids": engine.tokenize("abdog")}
    free = engine.generate("Hello", asked)[0].outputs[0].text
    first, pair = free[:1], free[1:3]
    for word in (first, pair):
        bound = engine.generate("Hello", {**asked, "bad_words": [word]})[0].outputs[0].text
        assert word not in bound
        assert len(bound) > 2
    assert first in engine.generate("Hello", {**asked, "bad_words": [pair]})[0].outputs[0].text


def test_what_no_token_spells_is_an_error_and_no_empty_text(tmp_path: Path) -> None:
    """A vocabulary of digits, with a token that ends a text and without one."""
    model = tmp_path / "digits"
    write_tiny(model, "qwen3")
    vocab = {str(digit): digit for digit in range(10)}
    tokenizer = Tokenizer(models.WordLevel({**vocab, "<unk>": 10}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(model)
    asked = {"max_tokens": 8, "seed": 1}
    with Rollout(str(model), device="cpu", dtype="float32", num_threads=1) as digits:
        for grammar in ({"json_object": True}, {"regex": "[0-9]x"}):
            with pytest.raises(InvalidRequest, match="no token of the model's vocabulary spells"):
                digits.generate([[1, 2]], {**asked, "structured_outputs": grammar})
        numbers = {**asked, "structured_outputs": {"regex": "[0-9]{3}"}}
        [output] = digits.generate([[1, 2]], numbers)
        assert re.fullmatch("[0-9]{3}", output.outputs[0].text.replace(" ", ""))
