"""Streams that ask for more than tokens go on elsewhere, too, when their member dies."""

import base64
from functools import partial
from io import BytesIO

import pytest
from fleet_front import Front, break_off
from shared_engines import TRIES
from tiny_vision import END, PAD, START, VIDEO, frames, picture, write_vision

from rollout import Rollout

LONG = {"max_tokens": 100, "temperature": 1.0, "ignore_eos": True, "group_id": "one member"}
ASKED = [
    {"structured_outputs": {"regex": "([a-f]{2}-)*[a-f]{400}"}, "logprobs": 1, "seed": 1},
    {"prompt_logprobs": 2, "seed": 2},
    {"prompt_logprobs": 0, "n": 2, "seed": 3},
    {"hidden_state": True, "pooling": "mean", "seed": 4},
]
PROMPTS = [[5, 6, 7, n, 8, 9] for n in range(len(ASKED))]


def broken_off(front, engines, outputs, count):
    """The last output of each row, after the engine where all run has ended under way, which
    ``engines`` lose; None where they were over before.
    """
    last, broken = {}, False
    before = {engine: engine.metrics().generation_tokens_total for engine in engines}
    while item := front.rollout._loop.run(anext(outputs, None)):
        last[item[0]] = item[1]
        samples = [sample for one in last.values() for sample in one.outputs]
        if broken or len(last) < count or min(len(s.token_ids) for s in samples) < 20:
            continue
        running = [engine for engine in engines if engine.metrics().running]
        if not running:
            return None
        [engine] = running
        break_off(engine)
        engines.remove(engine)
        broken = True
    assert broken
    assert any(engine.metrics().generation_tokens_total > before[engine] for engine in engines)
    return [last[row] for row in sorted(last)]


def agree(got, expected):
    for output, want in zip(got, expected, strict=True):
        assert output.prompt == want.prompt
        assert output.prompt_logprobs == want.prompt_logprobs
        assert output.hidden_state == want.hidden_state
        for sample, whole in zip(output.outputs, want.outputs, strict=True):
            assert (sample.token_ids, sample.text) == (whole.token_ids, whole.text)
            assert sample.finish_reason == whole.finish_reason
            assert sample.logprobs == whole.logprobs


@pytest.mark.parametrize("engines", [{"deterministic": True}], indirect=True, ids=[""])
def test_grammars_prompt_logprobs_and_hidden_states_go_on(front, engines):
    """With the bits of an undisturbed run."""
    params, stream = [{**LONG, **one} for one in ASKED], front.rollout._async
    expected = engines[0].generate(PROMPTS, params)
    assert set(expected[0].outputs[0].text) <= set("abcdef-")
    for _ in range(TRIES):  # they may be over before this test has looked
        if got := broken_off(front, engines, stream.stream_many(PROMPTS, params), len(PROMPTS)):
            break
    agree(got, expected)


def uri(image):
    out = BytesIO()
    image.save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def test_images_and_videos_go_on_in_prompts_and_in_chats(tmp_path):
    write_vision(tmp_path / "model", tokenizer=True)
    settings = {"device": "cpu", "dtype": "float32", "deterministic": True, "max_model_len": 512}
    engines = [Rollout(tmp_path / "model", num_threads=1, **settings) for _ in range(3)]
    ended = list(engines)
    front = Front(tmp_path / "record", engines)
    image, params = picture(1), {**LONG, "seed": 3}
    prompts = [[5, 6 + n, START, PAD, END, 9] for n in range(3)]
    given = [{"prompt_token_ids": ids, "multi_modal_data": {"image": image}} for ids in prompts]
    seen = {"image": image, "video": (frames(1), {"fps": 2.0})}
    both = [5, START, VIDEO, END, START, PAD, END, 9]
    given.append({"prompt_token_ids": both, "multi_modal_data": seen})
    show = {"type": "image_url", "image_url": {"url": uri(image)}}
    chats = [[{"role": "user", "content": [show]}], [{"role": "user", "content": "What is it?"}]]
    stream = front.rollout._async
    try:
        all_of = [engines[0].generate(given, params), engines[0].chat(chats, params)]
        verbs = [partial(stream.stream_many, given), partial(stream.stream_chat, chats)]
        for expected, again in zip(all_of, verbs, strict=True):
            for _ in range(TRIES):
                if got := broken_off(front, engines, again(params), len(expected)):
                    break
            agree(got, expected)
    finally:
        front.close()
        for engine in ended:
            engine.shutdown()
