"""The page at ``/``: who gets it and its figures, and what a browser makes of them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from browser import CHROMIUM, browser
from server_settings import CONTROL, TOKEN
from serving import Served, serve
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.cli.main import main
from rollout.errors import WeightMismatch

NAME = "<img src=x onerror=\"document.title='injected'\">"  # of a model


def test_the_page_is_open_and_its_figures_are_not(served: Served) -> None:
    with httpx.Client(base_url=f"http://{served.http}", timeout=30) as stranger:
        page = stranger.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "innerHTML" not in page.text
        assert stranger.get("/dashboard/state").status_code == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        state = stranger.get("/dashboard/state", headers=headers).json()
    assert state["model"] == "tiny"
    assert (state["ranks"], state["device"], state["stats"]["state"]) == (1, "cpu", "running")
    assert state["bytes"] > 0


def test_figures_receipts_and_errors_reach_the_page_and_the_terminal(
    served: Served, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with Rollout.connect(served.grpc, CONTROL) as engine:
        before = http.get("/dashboard/state").json()
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        with pytest.raises(WeightMismatch, match=r"no\.such"):
            engine.update_weights(iter([("no.such", torch.zeros(1))]))
        stats = engine.metrics()
    state = http.get("/dashboard/state").json()
    made = state["stats"]["generation_tokens_total"] - before["stats"]["generation_tokens_total"]
    assert made == 4
    assert state["time"] > before["time"]
    assert state["stats"]["weight_updates_failed_total"] == stats.weight_updates_failed_total >= 1
    assert "no.such" in state["errors"][-1]
    assert state["errors"] == list(stats.weight_update_errors)
    asked = ["top", served.grpc, "--token", CONTROL, "--once", "--interval", "0.1"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    for text in ("tiny  running", "tokens/s", "queue", "KV use", "error: ", "no.such"):
        assert text in shown


@pytest.mark.more
def test_the_terminal_is_drawn_anew_until_ctrl_c_and_left_as_it_was(served: Served) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rollout", "top", served.grpc, "--interval", "0.1"]
    env = {**os.environ, "ROLLOUT_TOKEN": TOKEN, "TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    try:
        deadline = time.monotonic() + 120
        while shown.count(b"tokens/s") < 4:
            assert select.select([ours], [], [], deadline - time.monotonic())[0], shown
            shown += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # which is how a terminal without a writer reads
            while more := os.read(ours, 1 << 16):
                shown += more
        assert process.wait(30) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[?1049h" in shown  # a screen of its own
    assert shown.rstrip().endswith(b"\x1b[?1049l")
    assert b"Traceback" not in shown


@pytest.mark.more
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: `make browser` installs it")
def test_a_browser_asks_for_the_token_shows_all_and_runs_nothing_of_a_name(tmp_path: Path) -> None:
    model, other = tmp_path / "tiny", tmp_path / "other"
    write_tiny(model, "llama")
    write_tiny(other, "llama", seed=1)
    flags = ("--served-model-name", NAME, "--token", TOKEN, "--dtype", "float32")
    with serve(model, *flags) as served, browser() as page:
        with Rollout.connect(served.grpc, TOKEN) as engine:
            engine.update_weights(other, label="<b>step 1</b>")
            engine.update_weights(model, label="step 2")
            page.send("Page.navigate", url=f"http://{served.http}/")
            page.wait_for("!document.getElementById('ask').hidden")
            _enter(page, "wrong")
            page.wait_for("document.getElementById('refused').textContent.includes('is wrong')")
            _enter(page, TOKEN)
            page.wait_for("!document.getElementById('shown').hidden")
            engine.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=64, ignore_eos=True))
            page.wait_for("document.getElementById('tiles').innerText.includes('256 in all')")
            engine.update_weights(other, label="step 3")
            page.wait_for("document.querySelectorAll('#updates tbody tr').length == 3")
            page.wait_for("document.querySelectorAll('svg .commit').length == 3")
            kept = engine.receipts()
        assert page.run("document.getElementById('model').textContent") == NAME
        assert page.run("document.title") == f"{NAME} - rollout"
        assert page.run("document.querySelectorAll('img, b b, td b').length") == 0
        rows = page.run("document.getElementById('updates').innerText")
        assert "v1 <b>step 1</b>" in rows
        for receipt in kept:
            assert f"{receipt.digest:016x}, 1 rank" in rows
        assert page.run("document.querySelectorAll('#timeline rect.live').length") == 3
        assert page.run("document.querySelectorAll('#timeline rect.update').length") == 3
        when = page.run("[...document.querySelectorAll('[data-at]')].map(one => one.textContent)")
        assert len(when) == 3
        assert all(text.endswith(" s ago") for text in when)
        page.run("document.querySelector('details').open = true")
        [held] = kept[-1].ranks  # the newest is the first row
        assert "rank 0 holds" in page.run("document.getElementById('updates').innerText")
        assert f"{held.digest:016x}" in page.run("document.getElementById('updates').innerText")
        parts = page.run("[...document.querySelectorAll('.part')].map(one => one.offsetWidth)")
        assert len(parts) >= 6
        assert all(parts)
        if at := os.environ.get("ROLLOUT_TEST_SCREENSHOTS"):
            for dark in (False, True):
                page.dark(dark)
                page.screenshot(Path(at) / f"{'dark' if dark else 'light'}.png")
        page.run("window.before = true")
        page.send("Page.reload")  # the token is of this tab, not of the address
        page.wait_for("!window.before && !document.getElementById('shown').hidden")
        _check_requests(page.events, f"http://{served.http}/")
        served.process.terminate()
        page.wait_for("document.getElementById('trouble').innerText.includes('does not answer')")
        assert not page.run("document.getElementById('shown').hidden")  # what was last known


def _enter(page: Any, token: str) -> None:
    page.run(f"document.getElementById('token').value = {json.dumps(token)}")
    page.run("document.querySelector('#ask button').click()")


def _check_requests(events: list[dict[str, Any]], origin: str) -> None:
    """All went to the service, none with the token in its address; nothing was blocked."""
    urls = [e["params"]["request"]["url"] for e in events if _kind(e) == "requestWillBeSent"]
    assert len(urls) > 5
    assert set(urls) <= {origin, f"{origin}dashboard/state", "data:,"}
    logged = [e["params"]["entry"] for e in events if _kind(e) == "entryAdded"]
    assert [one["text"] for one in logged if "401" not in one["text"]] == []
    assert not [e for e in events if _kind(e) == "exceptionThrown"]


def _kind(event: dict[str, Any]) -> str:
    return str(event.get("method", "")).rpartition(".")[2]
