"""Every command and program in README.md and docs/*.md runs, against one service.

What a page calls 127.0.0.1:50051, 127.0.0.1:8000, demo_output/start or runs/ is put there by the
fixtures; ``r`` is a connection to the service, ``model`` the trainer's module.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import make_certificates
from serving import Served, serve
from snippets import ROOT, Snippet, all_snippets, cut

from rollout import Rollout
from rollout.cli.flags import subparsers
from rollout.cli.main import main, make_parser

sys.path.insert(0, str(ROOT / "trainer_examples"))

from addition_task import END, Problem, answer_batch, encode, make_model, save_checkpoint

SNIPPETS = all_snippets()
SHOWN = (Problem(37, 85), Problem(2, 2))  # the sums that the pages ask for
JOB_LIMIT = 270.0


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which a reader would stand."""
    path = tmp_path_factory.mktemp("docs")
    torch.manual_seed(0)
    model = make_model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, labels = answer_batch(SHOWN)
    loss = torch.tensor(1.0)
    while loss > 0.01:
        logits = model(ids).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_checkpoint(model, path / "demo_output" / "start")
    run = path / "runs" / "run-7"
    shutil.copytree(path / "demo_output" / "start", run / "checkpoint-500")
    made = make_certificates(path)
    for name, called in (
        ("ours.pem", "cert.pem"),
        ("ours.key", "key.pem"),
        ("ours-ca.pem", "ca.pem"),
    ):
        shutil.copy(made(name), path / called)
    return path


@pytest.fixture(scope="module")
def served(where: Path) -> Iterator[Served]:
    with (
        contextlib.chdir(where),
        serve(Path("demo_output/start"), "--weight-dir", "runs") as served,
    ):
        yield served


@pytest.fixture
def fresh(served: Served, where: Path) -> Served:
    """The service with the weights it began with, whatever the snippets before have sent."""
    with Rollout.connect(served.grpc) as r:
        if not r.check_weights(where / "demo_output" / "start").equal:
            r.update_weights(where / "demo_output" / "start")
    return served


@pytest.fixture
def here(where: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(where)
    return where


@pytest.fixture(autouse=True)
def _log_settings_come_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def names(fresh: Served, where: Path) -> Iterator[dict[str, Any]]:
    """What a python snippet finds: see the module's docstring."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(where / "demo_output" / "start")
    with Rollout.connect(fresh.grpc) as r:
        yield {
            "__name__": "__snippet__",
            "r": r,
            "model": model,
            "prompts": ["37+85=", "02+02="],
            "messages": [{"role": "user", "content": "37+85="}],
        }
        assert r.generate("37+85=", {"temperature": 0.0})[0].outputs[0].text == "221", (
            "the snippet leaves a service that does not answer as before"
        )


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if s.language == "python"], ids=str)
def test_a_program_runs(
    snippet: Snippet, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    code = compiled(snippet, lambda text: text)
    if snippet.reason or snippet.file:  # a whole file is run by the command that names it
        return
    served, _ = request.getfixturevalue("served"), request.getfixturevalue("here")
    names = request.getfixturevalue("names")
    code = compiled(snippet, placed(served))
    exec(code, names)
    printed = capfd.readouterr().out
    for text in snippet.prints:
        assert text in printed, f"{snippet} prints {printed!r}"


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if s.language == "sh"], ids=str)
def test_a_command_runs(
    snippet: Snippet, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if snippet.reason:
        for words in snippet.commands:
            look_at(words)
        return
    served, here = request.getfixturevalue("fresh"), request.getfixturevalue("here")
    for other in SNIPPETS:
        if other.file and other.page == snippet.page:
            (here / other.file).write_text(placed(served)(other.text))
    for words in snippet.commands:
        run_command([placed(served)(word) for word in words], here)
    printed = capfd.readouterr().out
    for text in snippet.prints:
        assert text in printed, f"{snippet} prints {printed!r}"


def test_what_is_not_run_is_counted() -> None:
    """Few, and each for a reason that no test of this suite could take away."""
    reasons = Counter(s.reason for s in SNIPPETS if s.reason)
    assert reasons == NOT_RUN


NOT_RUN = {
    "it installs packages": 2,
    "runs/model stands for your checkpoint": 1,
    "peft_model stands for the trainer's own": 1,
    "needs a journal": 1,
    "needs a service of runs/model": 1,
    "needs a trainer's model": 1,
    "needs a GPU": 2,
    "the service of these pages serves a model of text": 3,
    "the service of these pages serves a dense model": 1,
    "it takes minutes": 4,
    "it takes half a minute": 1,
    "it needs two engines": 2,
    "it needs a fleet": 1,
    "it needs two engines, and a router of another project": 1,
    "it needs a cluster": 9,
    "it needs a large release": 3,
    "the framework's own test runs it": 4,
    "AsyncGRPOTrainer's attention kernel needs a card; tests/frameworks/trl_async_job.py runs "
    "these lines with plain torch in its place": 1,
    "large checkpoints and minutes of measuring": 38,
}


def test_the_tutorial_rewards_what_the_task_calls_right() -> None:
    [found] = [m for s in SNIPPETS if (m := re.search(r"^ANSWERS = (.*)$", s.text, re.MULTILINE))]
    for prompt, answer in literal_eval(found[1]).items():
        a, b = map(int, prompt.removesuffix("=").split("+"))
        assert Problem(a, b).answer == [*encode(answer), END]


# ---- the tests' own teeth ----


def of(language: str, text: str) -> Snippet:
    return Snippet("page.md", 7, language, text)


def test_a_broken_program_fails_at_its_line() -> None:
    with pytest.raises(AttributeError, match="generat"):
        exec(compiled(of("python", "import rollout\nrollout.generat\n"), str))
    with pytest.raises(SyntaxError) as caught:
        compiled(of("python", "r.generate(\n"), str)
    assert (caught.value.filename, caught.value.lineno) == ("page.md", 7)


@pytest.mark.parametrize(
    "line",
    [
        "rollout serve demo_output/start --no-such-flag",
        "rollout bench",
        "rollout nothing",
        "python benchmarks/nothing.py",
        "python benchmarks/sync.py CKPT --no-such-flag 3",
        "make nothing",
        "ls",
    ],
)
def test_a_broken_command_fails(line: str, here: Path) -> None:
    (words,) = of("sh", f"{line}  # a comment\n").commands
    with pytest.raises(AssertionError):
        run_command(words, here)


def test_no_command_escapes() -> None:
    with pytest.raises(ValueError, match="page:2: a command outside"):
        list(cut("text\n    rollout info\n", "page"))
    with pytest.raises(ValueError, match="page:1: a block in 'bash'"):
        list(cut("```bash\nls\n```\n", "page"))
    marked = "<!-- not run: a reason -->\n```sh\nls\n```\ntext\n```sh\nls\n```\n"
    assert [s.reason for s in cut(marked, "page")] == ["a reason", ""]
    page = "<!-- not run on this page: all -->\n\ntext\n```sh\nls\n```\n```sh\nls\n```\n"
    assert [s.reason for s in cut(page, "page")] == ["all", "all"]


# ---- how they are run ----


def compiled(snippet: Snippet, place: Callable[[str], str]) -> Any:
    """Its code; tracebacks name the page's line."""
    return compile("\n" * (snippet.line - 1) + place(snippet.text), snippet.page, "exec")


def placed(served: Served) -> Callable[[str], str]:
    """Puts what runs here in place of what a page says."""
    addresses = {"127.0.0.1:50051": served.grpc, "127.0.0.1:8000": served.http}
    pattern = re.compile("|".join(map(re.escape, addresses)))
    return lambda text: pattern.sub(lambda match: addresses[match[0]], text)


def run_command(words: list[str], here: Path) -> None:
    if words[:2] == ["rollout", "serve"]:
        start_service(words[2:])
    elif words[0] == "rollout":
        assert main(words[1:]) == 0, words
    elif words[0] == "pytest":
        assert (ROOT / words[-1]).exists(), words
    elif words[0] == "curl":
        assert subprocess.run([*words, "--silent", "--show-error", "--fail"]).returncode == 0, words
    elif words[0] == "torchrun" or (words[0] == "python" and (here / words[1]).is_file()):
        run_job(words, here)
    else:
        look_at(words)


class UntilReady(io.StringIO):
    """The standard output of a service that is to end as soon as it says that it is ready."""

    def write(self, text: str) -> int:
        if text.startswith("ready "):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def start_service(words: list[str]) -> None:
    """In this process, so that nothing is imported again; on free ports in place of its own."""
    free = [*words, "--device", "cpu", "--num-threads", "1", "--port", "0", "--grpc-port", "0"]
    with contextlib.redirect_stdout(UntilReady()) as out:
        assert main(["serve", *free]) == 0, words
    assert out.getvalue().startswith("ready http="), words


def run_job(words: list[str], here: Path) -> None:
    job = subprocess.run(
        [str(Path(sys.executable).with_name(words[0])), *words[1:]],
        cwd=here,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
        },
        timeout=JOB_LIMIT,
        check=False,
    )
    assert job.returncode == 0, words


def look_at(words: list[str]) -> None:
    """A command that is not run: its script or target exists, and has the flags it is given."""
    while words[0] == "env" or "=" in words[0]:
        words = words[1:]
    if words[0].endswith("python"):
        if any(s.file == words[1] for s in SNIPPETS):
            return
        if words[1] == "-m":
            words = [words[0], words[2].replace(".", "/") + ".py", *words[3:]]
        script = ROOT / words[1]
        assert script.is_file(), f"there is no {words[1]}"
        text = "".join(p.read_text() for p in script.parent.glob("*.py"))
        check_flags(words[2:], set(re.findall(r"--[a-z][a-z0-9-]*", text)))
    elif words[0] == "rollout":
        parser = make_parser()
        both = (parser, *subparsers(parser))
        check_flags(words[1:], {flag for one in both for flag in one._option_string_actions})
    elif words[0] == "pytest":
        assert (ROOT / words[-1]).exists(), words
    elif words[0] == "torchrun":
        assert any(s.file == words[-1] for s in SNIPPETS), f"no page has {words[-1]}"
    elif words[0] == "make":
        for target in words[1:]:
            rules = (ROOT / "Makefile").read_text()
            assert "=" in target or re.search(rf"^{target}:", rules, re.MULTILINE), target
    elif words[0] == "pip":
        extras = re.findall(r"\.\[(\w+)\]", " ".join(words))
        project = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras), words
    elif words[0] in ("docker", "kubectl"):
        paths = [word for word in words[1:] if word.startswith("deploy/")]
        assert all((ROOT / path).exists() for path in paths), words
    elif words[0] not in ("ray", "sglang-router", "vllm-router"):  # other projects' commands
        raise AssertionError(f"no test knows how to run {words}")


def check_flags(words: list[str], known: set[str]) -> None:
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert flag in known, f"unknown flag {flag} in {words}"
        elif " " in word:  # a command as an argument
            look_at(word.split())
