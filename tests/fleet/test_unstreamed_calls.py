"""Calls that are not streamed: what a front hears of them while they run, and what that is for."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fleet_front import ENGINE, Front, break_off
from serving import serve
from shared_engines import eventually, standing_still
from test_processes import resumed

from rollout import Rollout
from rollout.fleet.calls import call as fleet_call

SAME_BITS = pytest.mark.parametrize("engines", [{"deterministic": True}], indirect=True, ids=[""])
LONG = {"max_tokens": 200, "temperature": 1.0, "seed": 11, "ignore_eos": True}
TEXT = "three two one"
ASKED = (
    (TEXT, {**LONG, "max_tokens": 40, "logprobs": 2}),
    ([5, 6, 7], {"max_tokens": 40, "temperature": 0.0, "stop_token_ids": list(range(40))}),
    (TEXT, {**LONG, "max_tokens": 30, "n": 3, "top_p": 0.9, "presence_penalty": 0.5}),
    (TEXT, {**LONG, "max_tokens": 40, "stop": ["e", " a", "\n"], "min_tokens": 10}),
    (TEXT, {**LONG, "max_tokens": 40, "detokenize": False}),
    (TEXT, {**LONG, "max_tokens": 20, "prompt_logprobs": 1}),
    (TEXT, {**LONG, "max_tokens": 20, "return_sampling_mask": True, "top_k": 5}),
    (TEXT, {**LONG, "max_tokens": 20, "hidden_state": True}),
    ([5, 6, 7], {"max_tokens": 0, "prompt_logprobs": 0}),
    ([9, 6, 7], {"max_tokens": 3, "temperature": 0.0}),
)


def plain(outputs):
    """But for what names the call and the engine."""
    return [replace(output, request_id="", epoch=0) for output in outputs]


@SAME_BITS
def test_a_reply_is_the_one_of_an_engine_asked_directly(front, engines, monkeypatch):
    monkeypatch.setattr(fleet_call, "INTERVAL", 8)  # so that much is told while it runs
    prompts, params = zip(*ASKED, strict=True)
    told = []
    delivered = fleet_call.FleetCall.delivered

    def noted(self, row, output, epoch):
        told.append((row, output.finished))
        return delivered(self, row, output, epoch)

    monkeypatch.setattr(fleet_call.FleetCall, "delivered", noted)

    def asked(rollout, *call):
        front.rollout.reset_prefix_cache()
        return plain(rollout.generate(*call))

    def all_told():
        """On a busy machine what is told of a row may come together with its end."""
        assert asked(front.rollout, prompts, params) == asked(engines[0], prompts, params)
        return {row for row, finished in told if not finished} >= {0, 1, 2, 3, 4}

    eventually(all_told)
    for each in ASKED[:5]:
        assert asked(front.rollout, *each) == asked(engines[0], *each)
    message, chat = [{"role": "user", "content": TEXT}], {**LONG, "max_tokens": 20}
    replies = [plain(each.chat(message, chat)) for each in (engines[0], front.rollout)]
    replies = [[replace(one, num_cached_tokens=0) for one in reply] for reply in replies]
    assert replies[0] == replies[1]


@SAME_BITS
def test_a_call_goes_on_elsewhere_behind_what_the_front_was_told(
    front, engines, checkpoint, monkeypatch
):
    monkeypatch.setattr(fleet_call, "INTERVAL", 16)
    params = {**LONG, "n": 3, "logprobs": 2, "pin": True}
    with Rollout(checkpoint, deterministic=True, **ENGINE) as whole:
        [expected] = whole.generate(TEXT, params)
    made = dict.fromkeys(engines, 0)

    def new(engine):
        return engine.metrics().generation_tokens_total - made[engine]

    with ThreadPoolExecutor(1) as pool:

        def begin():
            made.update({e: e.metrics().generation_tokens_total for e in engines})
            asked = pool.submit(front.rollout.generate, TEXT, params)
            eventually(lambda: asked.done() or max(map(new, engines)) > 3 * 40)
            return asked

        asked = standing_still(begin, front.rollout, 3)
        lost = max(engines, key=new)
        before = new(lost)
        break_off(lost)
        eventually(lambda: resumed(front.rollout))  # once the front knows that it is gone
        [got] = asked.result(120)
    extra = sum(new(engine) for engine in engines if engine is not lost)
    assert 3 * 200 - before <= extra <= 3 * (200 - 17)  # and none was generated again but the last
    assert (got.prompt, got.prompt_token_ids) == (TEXT, expected.prompt_token_ids)
    for one, want in zip(got.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.text, one.logprobs) == (want.token_ids, want.text, want.logprobs)
        assert (one.finish_reason, one.weight_versions) == ("length", want.weight_versions)
        assert one.cumulative_logprob == want.cumulative_logprob


@pytest.mark.parametrize("asks", ["request", pytest.param("update", marks=pytest.mark.more)])
def test_what_finishes_on_its_version_begins_anew_where_that_is_gone(front, engines, trained, asks):
    """No sample has two versions because its member was lost."""
    params = {**LONG, "temperature": 0.0, "pin": asks == "request"}
    with ThreadPoolExecutor(1) as pool:

        def begin():
            base = front.rollout.metrics().generation_tokens_total
            asked = pool.submit(front.rollout.generate, TEXT, params)
            eventually(
                lambda: asked.done() or front.rollout.metrics().generation_tokens_total > base + 90
            )
            return asked

        asked = standing_still(begin, front.rollout, 1)
        lost = next(engine for engine in engines if engine.metrics().running)
        front.rollout.update_weights(trained, in_flight="pin" if asks == "update" else "keep")
        break_off(lost)
        eventually(lambda: resumed(front.rollout))  # once the front knows that it is gone
        [got] = asked.result(120)
    [expected] = front.rollout.generate(TEXT, params)
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids
    assert [span.version for span in got.outputs[0].weight_versions] == [1]


@pytest.mark.more
def test_a_call_goes_on_where_its_member_is_killed(checkpoint, tmp_path):
    """With the bits of an undisturbed run; the next member makes only what is missing."""
    settings = {**ENGINE, "max_model_len": 512, "num_kv_blocks": 256, "deterministic": True}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    flags[-1] = "--deterministic"
    params = {**LONG, "max_tokens": 450, "logprobs": 1}
    prompts = [[5, 6, 7, n] for n in range(3)]
    with (
        serve(checkpoint, *flags) as served,
        Rollout.connect(served.grpc) as killed,
        Rollout(checkpoint, **settings) as other,
        contextlib.closing(Front(tmp_path / "record", [killed, other])) as front,
        ThreadPoolExecutor(1) as pool,
    ):
        client = front.rollout
        front.fleet.wait_serving(2, 60)
        expected = other.generate(prompts, params)

        def made(rollout):
            return rollout.metrics().generation_tokens_total

        for number in range(40):  # a group whose requests go to the one that is to be killed
            before, params["group_id"] = made(other), f"g{number}"
            client.generate([[number + 5, 6]], {"max_tokens": 1, "group_id": f"g{number}"})
            if made(other) == before:
                break

        def begin():
            base = made(killed)
            asked = pool.submit(client.generate, prompts, params)
            eventually(lambda: asked.done() or made(killed) > base + 3 * 150)
            return asked

        asked = standing_still(begin, client, 3)
        before = made(other)
        os.kill(served.process.pid, signal.SIGKILL)
        eventually(lambda: resumed(client))
        got = asked.result(120)
        extra = made(other) - before
    for output, want in zip(got, expected, strict=True):
        [output], [want] = output.outputs, want.outputs
        assert (output.token_ids, output.logprobs) == (want.token_ids, want.logprobs)
        assert (output.text, output.weight_versions) == (want.text, want.weight_versions)
        assert output.finish_reason == "length"
    # Each row had told of its first token and of one interval beyond it, or more.
    assert (3 * 450 - extra) % 64 == 3
    assert extra <= 3 * (450 - 65)
