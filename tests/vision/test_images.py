"""Images beside prompts and in chats: what is taken, what is found again, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import Thread

import pytest
from PIL import Image
from tiny_vision import END, PAD, START, check_greedy, check_logprobs, picture, write_vision
from transformers.image_utils import load_image

from rollout import Rollout, SamplingParams
from rollout.engine.visuals.placeholders import place
from rollout.errors import InvalidRequest, PromptTooLong

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
ONE = [5, 6, START, PAD, END, 9, 8]
PARTS = 12  # of picture(1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    model = write_vision(path, tokenizer=True)
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 200}
    with Rollout(
        path, max_num_batched_tokens=16, max_images=3, max_image_pixels=4000, **settings
    ) as engine:
        yield engine, model


def file_of(image, kind="PNG"):
    out = BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def uri(image):
    return "data:image/png;base64," + base64.b64encode(file_of(image)).decode()


def asked(content):
    return [{"role": "user", "content": content}]


def ids_of(output):
    return output.outputs[0].token_ids


def test_equal_placeholders_of_other_images_find_no_blocks_and_equal_images_do(served):
    engine, model = served
    engine.reset_prefix_cache()
    first, second = picture(1), picture(3)
    cached = []
    for image in (first, second, first, second):
        [output] = engine.generate([ONE], GREEDY, images=[[image]])
        check_greedy(model, output, [image])
        cached.append(output.num_cached_tokens)
    assert len(ONE) - 1 + PARTS == 18
    assert cached == [0, 0, 16, 16]
    [output] = engine.generate([ONE], GREEDY, images=[[picture(4, 30, 21)]])  # as many parts
    assert output.num_cached_tokens == 0


def test_an_image_may_come_in_any_form_and_expanded_ids_stay_as_they_are(served, tmp_path):
    engine, model = served
    image = picture(5)
    image.save(tmp_path / "a.png")
    forms = [image, tmp_path / "a.png", file_of(image), uri(image)]
    outputs = engine.generate([ONE] * 4, GREEDY, images=[[form] for form in forms])
    check_greedy(model, outputs[0], [image])
    assert len({tuple(ids_of(output)) for output in outputs}) == 1
    expanded = outputs[0].prompt_token_ids
    assert expanded == [5, 6, START, *[PAD] * PARTS, END, 9, 8]
    given = {"prompt_token_ids": expanded, "multi_modal_data": {"image": image}}
    [again] = engine.generate(given, GREEDY)
    assert again.prompt_token_ids == expanded
    assert ids_of(again) == ids_of(outputs[0])
    with Rollout.connect(engine.address) as client:
        [remote] = client.generate(given, GREEDY)
        assert ids_of(remote) == ids_of(again)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_photo_is_turned_as_its_file_says(served, tmp_path, kind):
    """As transformers loads it: parts of one that is not square lie on another grid."""
    engine, model = served
    exif, out = Image.Exif(), BytesIO()
    exif[0x0112] = 6
    picture(1, 60, 30).save(out, format=kind, exif=exif)
    (tmp_path / "photo").write_bytes(out.getvalue())
    upright = load_image(str(tmp_path / "photo"))
    assert upright.size == (30, 60)
    outputs = engine.generate([ONE] * 2, GREEDY, images=[[out.getvalue()], [tmp_path / "photo"]])
    for output in outputs:
        check_greedy(model, output, [upright])


def test_images_that_touch_have_a_placeholder_each_where_there_are_as_many():
    for counts in ([4, 4, 4, 4], [3, 3, 3], [2, 1]):
        ids, starts = place([5, *[9] * len(counts), 7], counts, 9, "the prompt")
        assert ids == [5, *[9] * sum(counts), 7]
        assert starts == [1 + sum(counts[:i]) for i in range(len(counts))]
    assert place([5, *[9] * 8, 7], [4, 4], 9, "the prompt") == ([5, *[9] * 8, 7], [1, 5])


def test_chats_take_pictures_paths_and_data_uris(served, tmp_path):
    engine, model = served
    image, other = picture(6), picture(7, 40, 17)
    other.save(tmp_path / "b.png")
    text = {"type": "text", "text": "and"}
    parts = [
        {"type": "image", "image": image},
        text,
        {"type": "image", "image": tmp_path / "b.png"},
    ]
    [output] = engine.chat(asked(parts), GREEDY)
    check_greedy(model, output, [image, other])
    urls = [{"type": "image_url", "image_url": {"url": uri(one)}} for one in (image, other)]
    given = asked([urls[0], text, urls[1]])
    assert engine.tokenize(given) == output.prompt_token_ids
    with Rollout.connect(engine.address) as client:
        [remote] = client.chat(asked(parts), GREEDY)
    assert ids_of(remote) == ids_of(output)
    session = engine.session()
    session.chat(asked(parts[:2]), GREEDY)
    last = session.chat(asked([text, parts[2]]), GREEDY)
    check_greedy(model, last, [image, other])
    assert session.token_ids == [*last.prompt_token_ids, *ids_of(last)]


def test_samples_and_preempted_requests_see_their_images(served, tmp_path):
    _, model = served
    write_vision(tmp_path)
    tight = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_kv_blocks": 24}
    asking = SamplingParams(max_tokens=24, seed=3, logprobs=0, n=2)
    images = [picture(8), picture(9)]
    with Rollout(tmp_path, max_num_batched_tokens=16, **tight) as engine:
        outputs = engine.generate([ONE, ONE], asking, images=[[image] for image in images])
        assert engine.metrics().preemptions_total > 0
    for output, image in zip(outputs, images, strict=True):
        check_logprobs(model, output, [image])


def test_features_beyond_the_bound_are_made_again(served, tmp_path):
    _, model = served
    write_vision(tmp_path)
    one = PARTS * 3 * 48 * 4  # bytes: the embedding and two levels of each part, in float32
    settings = {"device": "cpu", "dtype": "float32", "enable_prefix_caching": False}
    with Rollout(tmp_path, encoder_cache_bytes=one, **settings) as engine:
        hits = []
        for seed in (1, 1, 3, 1):
            [output] = engine.generate([ONE], GREEDY, images=[[picture(seed)]])
            check_greedy(model, output, [picture(seed)])
            figures = engine.metrics()
            hits.append(figures.encoder_cache_hits_total)
            assert figures.encoder_cache_bytes == one
    assert hits == [0, 1, 1, 1]


def bomb(width, height):
    """A PNG whose header promises far more than it holds."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


BAD = {
    "no image": ([b"GIF89a is not all"], "image 0 is no image that can be read"),
    "truncated": ([file_of(picture(1))[:300]], "image 0 cannot be decoded"),
    "too large": ([picture(1), picture(2, 80, 60)], "image 1 has 80 x 60 pixels, .*=4000"),
    "a bomb": ([bomb(60000, 60000)], "more than max_image_pixels=4000"),
    "too thin": ([picture(1, 2000, 2)], "image 0 of 2000 x 2 pixels"),
    "too many": ([picture(1)] * 4, "4 images, but max_images is 3"),
    "one too many": ([picture(1)] * 2, r"2 images, but placeholders \(token 321\) for 1"),
    "a string": (["/etc/hostname"], "image 0 is a str; give an image of Pillow"),
    "no base64": (["data:image/png;base64,!"], "image 0 holds no base64"),
    "no file": ([b""], "image 0 is no image"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_image_is_refused_by_its_number_and_the_limit(served, what):
    engine, _ = served
    images, words = BAD[what]
    with pytest.raises(InvalidRequest, match=words):
        engine.generate([ONE], GREEDY, images=[images])


def test_wrong_placeholders_are_refused_by_name(served):
    engine, _ = served
    refused = {
        "image 0 takes 12 tokens, but its run of placeholders has 7": [5, *[PAD] * 7, 6],
        "placeholders for more images than the 1": [5, PAD, 6, PAD, 7],
        "for 0 of them": [5, 6, 7],
    }
    for words, ids in refused.items():
        with pytest.raises(InvalidRequest, match=words):
            engine.generate([ids], GREEDY, images=[[picture(1)]])
    with pytest.raises(InvalidRequest, match=r"placeholders of images \(token 321\) without"):
        engine.generate([ONE], GREEDY)
    with pytest.raises(PromptTooLong, match="12 of them for images"):
        engine.generate([[5] * 188 + [PAD]], GREEDY, images=[[picture(1)]])
    remote = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
    with pytest.raises(InvalidRequest, match=r"remote URL: .* --allow-remote-images"):
        engine.chat(asked([remote]), GREEDY)
    with pytest.raises(
        InvalidRequest, match=r"content\[0\] of type 'image_url' needs an image_url"
    ):
        engine.chat(asked([{"type": "image", "image": "/etc/hostname"}]), GREEDY)
    with pytest.raises(InvalidRequest, match="known: multi_modal_data, prompt, prompt_token_ids"):
        engine.generate({"prompt": "a", "mm_processor_kwargs": {}}, GREEDY)
    assert engine.generate([[5, 6]], GREEDY)[0].outputs[0].finish_reason == "length"


def test_remote_images_come_where_a_flag_allows_them_and_no_others(tmp_path):
    model = write_vision(tmp_path, tokenizer=True)
    image = picture(11)
    (tmp_path / "a.png").write_bytes(file_of(image))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    settings = {"device": "cpu", "dtype": "float32", "allow_remote_images": True}
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web, Rollout(tmp_path, **settings) as r:
        Thread(target=web.serve_forever, daemon=True).start()

        def chat(name):
            url = f"http://127.0.0.1:{web.server_port}/{name}"
            return r.chat(asked([{"type": "image_url", "image_url": {"url": url}}]), GREEDY)

        try:
            [output] = chat("a.png")
            with pytest.raises(InvalidRequest, match=r"content\[0\] cannot be fetched: .*404"):
                chat("b.png")
        finally:
            web.shutdown()
    check_greedy(model, output, [image])


def test_images_in_a_call_leave_the_event_loop_free(served):
    """Decoding runs in threads: a task of the loop goes on meanwhile."""
    engine, _ = served
    beats = []

    async def beat():
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def ask():
        pulse = asyncio.create_task(beat())
        try:
            images = [[picture(20 + n, 60, 60)] for n in range(8)]
            prompts = [{"prompt_token_ids": ONE, "multi_modal_data": {"image": i}} for i in images]
            return await engine._async.generate(prompts, GREEDY)
        finally:
            pulse.cancel()

    outputs = engine._loop.run(ask())
    assert len(outputs) == 8
    assert len(beats) > 5
