"""Files of videos: which frames are seen, and what broken and hostile files end as."""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import os
import re
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace

import httpx
import numpy as np
import pytest
from tiny_vision import END, START, VIDEO, check_greedy, frames, write_vision

from rollout import Rollout, SamplingParams
from rollout.engine.visuals.frame_sampling import FrameSampling
from rollout.engine.visuals.limits import VisualLimits
from rollout.engine.visuals.video_files import VideoFileReader
from rollout.errors import InvalidRequest
from rollout.generation import VideoFile
from rollout.server.http.app import build_app

av = pytest.importorskip("av", reason="PyAV is not installed: the extra `video`")

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
ONE = [5, 6, START, VIDEO, END, 9, 8]
LIMITS = VisualLimits(
    max_images=4, max_pixels=4000, max_videos=2, max_video_frames=16, max_video_pixels=40_000,
    max_tokens=512,
)  # fmt: skip
READER = VideoFileReader(LIMITS)


def written(
    pictures, kind="mp4", codec="libx264", rate=8, rotation=0, pixels="yuv420p", **options
):  # uint8 [frames, height, width, 3]
    out = BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pixels
        if rotation:
            stream.set_display_rotation(rotation)
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def moving(count, width=24, height=16):
    """No two frames are alike, also when they have been compressed."""
    at = np.linspace(0, 255, count)[:, None, None, None]
    across = np.linspace(0, 60, width)[None, None, :, None]
    return np.broadcast_to((at + across) % 256, (count, height, width, 3)).astype(np.uint8)


def whole(data):
    """All frames, by PyAV alone."""
    with av.open(BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def asking(video):
    return {"prompt_token_ids": ONE, "multi_modal_data": {"video": video}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    model = write_vision(path, tokenizer=True)
    with Rollout(
        path, device="cpu", dtype="float32", max_model_len=200, max_video_frames=8,
        max_image_pixels=4000, max_video_pixels=6000, served_model_name="tiny",
    ) as engine:  # fmt: skip
        yield engine, model


def transformers_processor(monkeypatch, kind):
    """Its class, of which sampling alone is used: what is missing for the rest is left out."""
    name = f"transformers.models.{kind}.video_processing_{kind}"
    if importlib.util.find_spec("torchvision") is None:
        whole = ("torchvision", "transforms", "v2", "functional")
        for length in range(1, 5):
            module = ".".join(whole[:length])
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return found.Qwen2VLVideoProcessor if kind == "qwen2_vl" else found.Qwen3VLVideoProcessor


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_vl"])
def test_frames_are_sampled_as_transformers_samples_them(kind, monkeypatch):
    from transformers.video_utils import VideoMetadata

    is_old, hf = kind == "qwen2_vl", transformers_processor(monkeypatch, kind)
    own = FrameSampling.read({"do_sample_frames": True}, 2 if is_old else None)
    known = SimpleNamespace(
        fps=None if is_old else 2, num_frames=None, min_frames=4, max_frames=768,
        temporal_patch_size=2,
    )  # fmt: skip
    asked = [{"fps": 2}, {"fps": 0.3}, {"fps": 30.0}, {"num_frames": 8}, {"num_frames": 7}]
    for total in (*range(1, 40), 240, 900, 5000, 100_000):
        for rate in (1.0, 8.0, 24.0, 24000 / 1001, 30000 / 1001, 60.0):
            for said in [*asked, *([] if is_old else [{}])]:
                sampling = own.asked(VideoFile(data=b"", **said))
                metadata = VideoMetadata(total_num_frames=total, fps=rate)
                own_known = known
                if "num_frames" in said:  # which its caller must do: they exclude each other
                    own_known = SimpleNamespace(**{**vars(known), "fps": None})
                try:
                    wanted = hf.sample_frames(own_known, metadata, **said).tolist()
                except (ValueError, ZeroDivisionError):
                    with pytest.raises(ValueError, match="cannot be sampled"):
                        sampling.count(total, rate)
                    continue
                assert sampling.indices(total, sampling.count(total, rate)) == wanted


def test_what_is_sampled_follows_the_file_and_the_request():
    qwen3, qwen2 = FrameSampling.read({}, None), FrameSampling.read({}, 2)
    assert qwen3.count(240, 24.0) == 20
    assert qwen2.count(240, 24.0) == 240  # its processor samples where it is asked
    assert qwen2.asked(VideoFile(data=b"", fps=2)).count(240, 24.0) == 20
    assert qwen3.asked(VideoFile(data=b"", max_frames=6)).count(240, 24.0) == 6
    assert qwen3.asked(VideoFile(data=b"", min_frames=30)).count(240, 24.0) == 30
    assert qwen3.asked(VideoFile(data=b"", do_sample_frames=False)).count(240, 24.0) == 240
    assert qwen3.asked(VideoFile(data=b"", num_frames=12)).count(240, 24.0) == 12
    assert qwen3.asked(VideoFile(data=b"", fps=1e308)).count(240, 1e-300) == 240
    assert FrameSampling.read({"num_frames": 6, "fps": 2}, None).count(240, 24.0) == 6
    assert qwen3.indices(3, 5) == [0, 0, 1, 2, 2]


WRITTEN = {
    "h264": {},
    "many key frames": {"g": "3", "bf": "0"},
    "open groups": {"g": "6", "bf": "3", "x264-params": "open-gop=1:scenecut=0:keyint=6"},
    "vp9": {"kind": "webm", "codec": "libvpx-vp9"},
    "vp8": {"kind": "webm", "codec": "libvpx"},
    "mkv": {"kind": "matroska"},
    "avi": {"kind": "avi", "codec": "mpeg4"},
    "23.976": {"rate": 24000 / 1001},
}


@pytest.mark.parametrize("what", WRITTEN)
def test_frames_are_those_of_transformers_reader_of_pyav(tmp_path, what):
    from fractions import Fraction

    from transformers.video_utils import read_video_pyav

    options = dict(WRITTEN[what])
    options["rate"] = Fraction(options.get("rate", 8)).limit_denominator(1001)
    data = written(moving(40), **options)
    about = READER.about(data, "it")
    assert (about.frames, about.width, about.height) == (40, 24, 16)
    assert about.fps == float(options["rate"])
    path = tmp_path / "video"
    path.write_bytes(data)
    for indices in ([5, 9, 17, 38], [20, 21, 39], list(range(40))):
        wanted, metadata = read_video_pyav(str(path), lambda indices=indices, **_: indices)
        found = list(READER.frames(data, about, indices, "it"))
        assert np.array_equal(np.stack(found), wanted)
        assert metadata.fps in (about.fps, None)
    assert [f.mean() for f in READER.frames(data, about, [3, 3, 4], "it")] == [
        *(whole(data)[3].mean(),) * 2, whole(data)[4].mean()
    ]  # fmt: skip


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_a_display_matrix_turns_the_frames(degrees):
    data = written(moving(4), rotation=degrees)
    about = READER.about(data, "it")
    assert (about.width, about.height) == ((24, 16) if degrees == 180 else (16, 24))
    [found] = READER.frames(data, about, [2], "it")
    assert np.array_equal(found, np.rot90(whole(data)[2], degrees // 90))


def test_a_file_may_come_in_any_form_and_equals_its_frames(served, tmp_path):
    engine, model = served
    data = written(moving(16))
    path = tmp_path / "a.mp4"
    path.write_bytes(data)
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    forms = [data, path, uri, (data, None), [data], [path], ((path), {"fps": 2})]
    outputs = engine.generate([asking(form) for form in forms], GREEDY)
    indices = [0, 5, 10, 15]  # 2 a second of 2 seconds
    video = np.stack([whole(data)[index] for index in indices])
    metadata = {"fps": 8.0, "frames_indices": indices, "total_num_frames": 16}
    [wanted] = engine.generate(asking((video, metadata)), GREEDY)
    check_greedy(model, outputs[0], [], [(video, 2.0)])
    for output in outputs:
        assert output.prompt_token_ids == wanted.prompt_token_ids
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    question = [{"role": "user", "content": [{"type": "video", "video": path, "num_frames": 6}]}]
    [asked] = engine.chat(question, GREEDY)
    sampled = np.linspace(0, 15, 6).round().astype(int)
    check_greedy(model, asked, [], [(np.stack([whole(data)[n] for n in sampled]), 3.0)])
    with Rollout.connect(engine.address) as client:
        [remote] = client.generate(asking((path, {"max_frames": 4})), GREEDY)
        assert remote.prompt_token_ids == wanted.prompt_token_ids
        [remote] = client.chat(question, GREEDY)
        assert remote.outputs[0].token_ids == asked.outputs[0].token_ids


async def test_http_takes_a_file_and_fetches_none_unasked(served):
    engine, _ = served
    data = written(moving(16))
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    transport = httpx.ASGITransport(build_app(engine._async), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def sent(url, **said):
            part = {"type": "video_url", "video_url": {"url": url}, **said}
            body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
            body |= {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
            reply = await client.post("/v1/chat/completions", json=body)
            return reply.status_code, reply.json()

        status, answer = await sent(uri, num_frames=6)
        assert status == 200
        part = {"type": "video", "video": data, "num_frames": 6}
        [output] = engine.chat([{"role": "user", "content": [part]}], GREEDY)
        assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
        for url, words in (
            ("https://example.invalid/a.mp4", r"content\[0\] is a remote URL: send a data: URI"),
            ("file:///etc/passwd", r"content\[0\] of type 'video_url' needs a video_url"),
            ("data:video/mp4;base64,AAAA", "video 0 is no video that can be decoded"),
        ):
            status, answer = await sent(url)
            assert status == 400
            assert re.search(words, answer["error"]["message"])


def test_a_remote_file_comes_where_the_flag_of_images_allows_it(tmp_path):
    model = write_vision(tmp_path, tokenizer=True)
    data = written(moving(16))
    (tmp_path / "a.mp4").write_bytes(data)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    settings = {"device": "cpu", "dtype": "float32", "allow_remote_images": True}
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web, Rollout(tmp_path, **settings) as r:
        Thread(target=web.serve_forever, daemon=True).start()

        def chat(name):
            url = {"url": f"http://127.0.0.1:{web.server_port}/{name}"}
            part = {"type": "video_url", "video_url": url, "num_frames": 4}
            return r.chat([{"role": "user", "content": [part]}], GREEDY)

        try:
            [output] = chat("a.mp4")
            with pytest.raises(InvalidRequest, match=r"content\[0\] cannot be fetched: .*404"):
                chat("b.mp4")
        finally:
            web.shutdown()
    check_greedy(model, output, [], [(np.stack([whole(data)[n] for n in (0, 5, 10, 15)]), 2.0)])


def test_decoding_leaves_the_event_loop_free(served):
    engine, _ = served
    beats = []

    async def beat():
        while True:
            beats.append(1)
            await asyncio.sleep(0.001)

    async def ask():
        pulse = asyncio.create_task(beat())
        try:
            return await engine._async.generate(asking(written(moving(17))), GREEDY)
        finally:
            pulse.cancel()

    assert len(engine._loop.run(ask())) == 1
    assert len(beats) > 20


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n"
BAD = {
    "nothing": (b"", "video 0 is no video that can be decoded, MP4.*or decode it before"),
    "noise": (os.urandom(4000), "video 0 is no video that can be decoded"),
    "a playlist": (PLAYLIST, "video 0 is no video that can be decoded"),
    "a cut file": (lambda: written(moving(16))[:200], "video 0 is no video that can be"),
    "no fps": ((b"", {"fps": 0}), "video 0: fps cannot be 0"),
    "many": ((b"", {"num_frames": 2.5}), "video 0: num_frames cannot be 2.5"),
    "both": ((b"", {"num_frames": 2, "fps": 1}), "fps or num_frames, not both"),
    "bounds": ((b"", {"min_frames": 3, "max_frames": 2}), "min_frames is above max_frames"),
    "indices": ((b"", {"frames_indices": [0]}), "are those of frames, not of a file"),
    "no path": (Path("/nowhere/a.mp4"), "video 0 cannot be read: /nowhere/a.mp4 is no file"),
    "a device": (Path("/dev/zero"), "video 0 cannot be read: /dev/zero is no file"),
    "large": (lambda: written(moving(4, 80, 60)), "frames of 80 x 60 .*max_image_pixels=4000"),
    "long": (
        lambda: (written(moving(16)), {"do_sample_frames": False}),
        "video 0 has 16 frames, but max_video_frames is 8",
    ),
    "too much": (lambda: written(moving(16, 50, 40)), "4 frames of 50 x 40 .*pixels=6000"),
    "one frame": (lambda: written(moving(1)), "video 0 of 1 frames of 24 x 16"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_by_its_number_and_the_remedy(served, what):
    video, words = BAD[what]
    with pytest.raises(InvalidRequest, match=words):
        served[0].generate(asking(video() if callable(video) else video), GREEDY)


def test_a_file_of_sound_alone_has_no_video_stream():
    out = BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        silence.sample_rate = 8000
        container.mux(stream.encode(silence))
        container.mux(stream.encode(None))
    with pytest.raises(InvalidRequest, match="it has no video stream"):
        READER.about(out.getvalue(), "it")


def test_a_size_that_changes_midway_is_refused():
    small, large = (
        written(moving(4, *size), "h264", **{"x264-params": "annexb=1"})
        for size in ((24, 16), (48, 32))
    )
    out = BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream, at = None, 0
        for part in (small, large):
            with av.open(BytesIO(part), format="h264") as source:
                stream = stream or container.add_stream_from_template(source.streams.video[0])
                for packet in source.demux(video=0):
                    if packet.size:
                        packet.stream, packet.pts, packet.dts = stream, at, at
                        container.mux(packet)
                        at += packet.duration or 48_000
    data = out.getvalue()
    about = READER.about(data, "it")
    assert about.frames == 8
    assert len(list(READER.frames(data, about, [0, 1], "it"))) == 2
    with pytest.raises(InvalidRequest, match="it changes its size: frame 5 has 48 x 32 pixels"):
        list(READER.frames(data, about, [0, 5], "it"))


def test_damaged_files_end_as_frames_or_as_refused_requests():
    data = written(moving(16), g="4")
    for seed in range(6):
        values = bytearray(data)
        draw = np.random.default_rng(seed)
        for at in draw.integers(0, len(values), 20):
            values[at] = draw.integers(256)
        try:
            about = READER.about(bytes(values), "it")
            some = sorted({0, about.frames // 2})
            assert len(list(READER.frames(bytes(values), about, some, "it"))) == len(some)
        except InvalidRequest:
            continue


def test_a_file_that_takes_too_long_is_refused_at_the_deadline():
    slow = VideoFileReader(LIMITS, deadline=0)
    with pytest.raises(InvalidRequest, match="it takes more than 0 s to decode: send less of it"):
        slow.about(written(moving(4)), "it")


def test_an_absurd_duration_bounds_nothing_but_the_times(served):
    """A header may say what it likes: frames are counted."""
    data = bytearray(written(frames(1, 8), rate=1))
    at = data.index(b"mvhd") + 4 + 16
    data[at : at + 4] = b"\xff\xff\xff\xff"
    about = READER.about(bytes(data), "it")
    assert about.frames == 8


def test_a_header_that_claims_too_many_frames_ends_within_the_bounds():
    data = bytearray(written(moving(8)))
    at = data.index(b"stsz") + 8
    data[at : at + 8] = b"\0\0\0\1" + b"\x7f\xff\xff\xff"  # of one byte each
    with pytest.raises(InvalidRequest, match=r"it (has no frames|is no video|needs more)"):
        READER.about(bytes(data), "it")


def test_without_pyav_a_file_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match=r"-e '.\[video\]'; .* send its frames"):
        READER.about(b"", "it")
