"""Videos beside prompts and in chats: against transformers, in the caches, and what is refused."""

from __future__ import annotations

import base64
import json
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import (
    END,
    KINDS,
    PAD,
    START,
    VIDEO,
    check_greedy,
    check_logprobs,
    frames,
    patches,
    picture,
    processor,
    write_vision,
)

from rollout import Rollout, SamplingParams
from rollout.api.video_inputs import as_video
from rollout.engine.sequences.visual_positions import VisualPositions
from rollout.engine.visuals.frames import FrameProcessor, FrameRules
from rollout.engine.visuals.limits import VisualLimits
from rollout.engine.visuals.placeholders import TimedVideo, timed
from rollout.errors import InvalidRequest, PromptTooLong
from rollout.generation import PatchedVisual, PlacedVisual
from rollout.models.config.model import ModelConfig

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
ONE = [5, 6, START, VIDEO, END, 9, 8]
MIXED = [5, START, PAD, END, 7, START, VIDEO, END, START, VIDEO, END, 3, START, PAD, END, 9]
SETTINGS = {"device": "cpu", "dtype": "float32", "block_size": 4}
LIMITS = VisualLimits(
    max_images=16, max_pixels=1 << 20, max_videos=4, max_video_frames=64,
    max_video_pixels=1 << 22, max_tokens=512,
)  # fmt: skip


def asking(ids, video=None, image=None):
    shown = {"image": image, "video": video}
    data = {name: given for name, given in shown.items() if given is not None}
    return {"prompt_token_ids": ids, "multi_modal_data": data}


def at(video, fps=2.0):
    return video, {"fps": fps}


def ids_of(output):
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("video")
    model = write_vision(path, tokenizer=True)
    limits = {"max_videos": 2, "max_video_frames": 8, "max_image_pixels": 4000}
    with Rollout(
        path, max_num_batched_tokens=16, max_model_len=200, max_video_pixels=6000, **limits,
        **SETTINGS,
    ) as engine:  # fmt: skip
        yield engine, model


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_transformers_whole_and_in_chunks(tmp_path, kind):
    """Two videos and two images in one prompt, one of them of an odd number of frames."""
    model = write_vision(tmp_path, kind, tokenizer=True)
    videos = [(frames(1), 2.0), (frames(2, 5, 16, 16), 3.0)]
    pictures = [picture(1), picture(2, 40, 17)]
    given = [at(*video) for video in videos]
    prompts = [asking(ONE, given[0]), asking(MIXED, given, pictures), [5, 6, 7]]
    for budget in (512, 7):
        with Rollout(tmp_path, max_num_batched_tokens=budget, **SETTINGS) as engine:
            outputs = engine.generate(prompts, GREEDY)
        check_greedy(model, outputs[0], [], videos[:1])
        check_greedy(model, outputs[1], pictures, videos)
        check_greedy(model, outputs[2], [])


def test_two_ranks_see_what_one_does(tmp_path):
    model = write_vision(tmp_path, tokenizer=True)
    with Rollout(tmp_path, tensor_parallel_size=2, **SETTINGS) as engine:
        [output] = engine.generate(asking(ONE, at(frames(1))), GREEDY)
    check_greedy(model, output, [], [(frames(1), 2.0)])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("fps", [0.7, 2.0, 24.0])
def test_positions_are_those_of_transformers(kind, fps):
    model = write_vision(None, kind)
    [_, (t, h, w)] = patches(frames(1, 7))
    whole = "2_5" in kind
    each = [(0, h, w)] * t if not whole else [(t, h, w)]
    ids, placed = [5], []
    for grid in ((1, 4, 2), *each, (1, 2, 4)):
        is_video = grid in each
        grid = (max(grid[0], 1), *grid[1:])
        visual = PatchedVisual(pixels=torch.zeros(0), grid=grid, merge=2)
        pace = model.config.vision_config.tokens_per_second * 2 / fps if whole else 1.0
        placed.append(PlacedVisual(visual=visual, start=len(ids), pace=pace if is_video else 1.0))
        ids += [VIDEO if is_video else PAD] * visual.count + [6, 7]
    tokens = torch.tensor([ids])
    kinds = (tokens == PAD).int() + 2 * (tokens == VIDEO).int()
    rates = {"second_per_grid_ts": torch.tensor([2 / fps])} if whole else {}
    wanted, _ = model.model.get_rope_index(
        tokens,
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor([(1, 4, 2), (1, 2, 4)]),
        video_grid_thw=torch.tensor([(t, h, w)]),
        **rates,
    )
    found = VisualPositions(len(ids), placed)
    assert found.of(0, len(ids)).tolist() == wanted[:, 0].tolist()
    assert found.of(len(ids), len(ids) + 1)[0] == wanted[:, 0, -1].max() + 1


def test_other_frames_or_another_pace_find_no_blocks_and_equal_ones_do(served, tmp_path):
    engine, model = served
    engine.reset_prefix_cache()
    cached = []
    for seed in (1, 2, 1, 2):
        [output] = engine.generate(asking(ONE, at(frames(seed))), GREEDY)
        check_greedy(model, output, [], [(frames(seed), 2.0)])
        cached.append(output.num_cached_tokens)
    before = output.prompt_token_ids.index(VIDEO) // 4 * 4  # the first time's text
    most = (len(output.prompt_token_ids) - 1) // 4 * 4
    assert cached == [0, before, most, most]
    whole = write_vision(tmp_path, "qwen2_5_vl")
    with Rollout(tmp_path, **SETTINGS) as other:
        cached = []
        for fps in (2.0, 1.0, 2.0):  # equal ids, other positions
            [output] = other.generate(asking(ONE, at(frames(1), fps)), GREEDY)
            check_greedy(whole, output, [], [(frames(1), fps)])
            cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 16]


def test_a_video_may_come_in_any_form_and_expanded_ids_stay_as_they_are(served):
    engine, model = served
    video = frames(3)
    images = [Image.fromarray(one) for one in video]
    uri = "data:video/jpeg;base64," + ",".join(map(encoded, images))
    metadata = {"fps": 2.0, "frames_indices": np.arange(4), "total_num_frames": 4, "duration": 2}
    forms = [
        *(at(video), at(torch.from_numpy(video)), at(images), at(list(video)), at(uri)),
        *([at(video)], (video, metadata)),
    ]
    outputs = engine.generate([asking(ONE, form) for form in forms], GREEDY)
    check_greedy(model, outputs[0], [], [(video, 2.0)])
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1
    assert len({tuple(ids_of(output)) for output in outputs}) == 1
    expanded = outputs[0].prompt_token_ids
    stamps = [engine.tokenize(f"<{time} seconds>") for time in ("0.2", "1.2")]
    inner = [*stamps[0], START, *[VIDEO] * 6, END, *stamps[1], START, *[VIDEO] * 6, END]
    assert expanded == [5, 6, START, *inner, END, 9, 8]
    [again] = engine.generate(asking(expanded, at(video)), GREEDY)
    assert again.prompt_token_ids == expanded
    with Rollout.connect(engine.address) as client:
        [remote] = client.generate(asking(ONE, at(video)), GREEDY)
    assert ids_of(remote) == ids_of(again) == ids_of(outputs[0])
    shifted = {"fps": 8.0, "frames_indices": [8, 16, 24, 32], "total_num_frames": 40}
    [later] = engine.generate(asking(ONE, (video, shifted)), GREEDY)
    assert engine.tokenize("<1.5 seconds>") == later.prompt_token_ids[3:16][: len(stamps[0])]


def encoded(image):
    out = BytesIO()
    image.save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode()


def test_chats_and_sessions_take_videos_between_images(served):
    engine, model = served
    video, image = frames(4), picture(4)
    parts = [
        {"type": "text", "text": "Look"},
        {"type": "video", "video": video, "fps": 2.0},
        {"type": "image", "image": image},
    ]
    messages = [{"role": "user", "content": parts}]
    [output] = engine.chat(messages, GREEDY)
    check_greedy(model, output, [image], [(video, 2.0)])
    with Rollout.connect(engine.address) as client:
        [remote] = client.chat(messages, GREEDY)
        assert ids_of(remote) == ids_of(output)
    session = engine.session()
    session.chat(messages[:1], GREEDY)
    second = {"type": "video", "video": frames(5, 2), "fps": 2.0}
    last = session.chat([{"role": "user", "content": [second]}], GREEDY)
    check_greedy(model, last, [image], [(video, 2.0), (frames(5, 2), 2.0)])


def test_samples_and_preempted_requests_see_their_videos(served, tmp_path):
    _, model = served
    write_vision(tmp_path, tokenizer=True)
    asked = SamplingParams(max_tokens=24, seed=3, logprobs=0, n=2)
    videos = [frames(8), frames(9)]
    with Rollout(tmp_path, max_num_batched_tokens=16, num_kv_blocks=34, **SETTINGS) as engine:
        outputs = engine.generate([asking(ONE, at(video)) for video in videos], asked)
        assert engine.metrics().preemptions_total > 0
    for output, video in zip(outputs, videos, strict=True):
        check_logprobs(model, output, [], [(video, 2.0)])


def test_drafts_of_a_prompt_with_a_video_change_no_token(served, tmp_path):
    engine, _ = served
    write_vision(tmp_path, tokenizer=True)
    long = SamplingParams(max_tokens=24, temperature=0.0)
    prompt = asking([*ONE, 9, 8, 9, 8, 9, 8], at(frames(3)))
    with Rollout(tmp_path, num_speculative_tokens=2, **SETTINGS) as drafting:
        [drafted] = drafting.generate(prompt, long)
    [plain] = engine.generate(prompt, long)
    assert ids_of(drafted) == ids_of(plain)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_an_update_while_a_video_is_answered_equals_a_fresh_start(tmp_path, kind):
    write_vision(tmp_path / "first", kind, tokenizer=True)
    second = write_vision(tmp_path / "second", kind, seed=1, tokenizer=True)
    prompt, video = asking(ONE, at(frames(6))), [(frames(6), 2.0)]
    settings = {**SETTINGS, "enable_prefix_caching": False}  # the same steps, so the same bits
    with Rollout(tmp_path / "second", **settings) as engine:
        [fresh] = engine.generate(prompt, GREEDY)
    with Rollout(tmp_path / "first", **settings) as engine:
        engine.generate(prompt, GREEDY)
        streamed = engine.stream(prompt, SamplingParams(max_tokens=100, temperature=0.0))
        next(streamed)
        engine.pause_generation("keep")
        engine.update_weights(second, in_flight="recompute")
        engine.resume_generation()
        *_, last = streamed
        assert [span.version for span in last.outputs[0].weight_versions] == [0, 1]
        [live] = engine.generate(prompt, GREEDY)
    check_greedy(second, live, [], video)
    assert ids_of(live) == ids_of(fresh)
    assert live.outputs[0].logprobs.raw == fresh.outputs[0].logprobs.raw


BAD = {
    "no fps": (frames(1), "video 0 needs the frames per second of the video, .*got None"),
    "a bad fps": (at(frames(1), -1.0), "got -1.0"),
    "a path": (("/a.mp4", {"fps": 2}), "video 0 is a str: frames are a uint8 array"),
    "a file": (
        ("data:video/mp4;base64,AAAA", {"fps": 2}),
        "video 0 is no video that can be decoded, MP4|needs PyAV",
    ),
    "floats": (at(frames(1) / 255.0), "frame 0 is an array of float64, 16 x 24 x 3: frames are"),
    "planes": (at(frames(1).transpose(0, 3, 1, 2)), "array of uint8, 3 x 16 x 24"),
    "nothing": (at([]), "video 0 is a list: frames are"),
    "indices": ((frames(1), {"fps": 2, "frames_indices": [1, 0, 2, 3]}), "must be 4 rising"),
    "sampling": ((frames(1), {"fps": 2, "do_sample_frames": True}), "sample them before"),
    "too many": ([at(frames(1))] * 3, "the prompt has 3 videos, but max_videos is 2"),
    "too long": (at(frames(1, 9, 8, 8)), "video 0 has 9 frames, but max_video_frames is 8"),
    "too large": (at(frames(1, 2, 80, 60)), "video 0: frame 0 has 80 x 60 pixels, more than"),
    "too much": (at(frames(1, 8, 40, 40)), "video 0 has 8 frames of 40 x 40 .*pixels=6000"),
    "unequal": (at([frames(1)[0], frames(1, 1, 8, 8)[0]]), "frame 1 has 8 x 8 .*have one size"),
    "one frame": (at(frames(1, 1)), "video 0 of 1 frames of 24 x 16 pixels: t:1 must be larger"),
    "no image": (at([b"GIF89a is not all"]), "video 0: frame 0 is no image that can be read"),
    "two for one": ([at(frames(1))] * 2, r"has 2 videos, but placeholders \(token 323\) for 1"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_video_is_refused_by_its_number_and_the_limit(served, what):
    engine, _ = served
    video, words = BAD[what]
    with pytest.raises(InvalidRequest, match=words):
        engine.generate(asking(ONE, video), GREEDY)


def test_wrong_placeholders_are_refused_by_name(served, tmp_path):
    engine, _ = served
    refused = {
        "video 0 takes 6 tokens at each of its 2 times, but .* has 7": [5, *[VIDEO] * 7, 6],
        "placeholders for more videos than the 1": [5, VIDEO, 6, VIDEO, 7],
        "for 0 of them": [5, *[VIDEO] * 6, 7],
        "placeholders for more images than the 0": [*ONE, PAD],
    }
    for words, ids in refused.items():
        with pytest.raises(InvalidRequest, match=words):
            engine.generate(asking(ids, at(frames(1))), GREEDY)
    with pytest.raises(InvalidRequest, match=r"placeholders of videos \(token 323\) without"):
        engine.generate([ONE], GREEDY)
    with pytest.raises(PromptTooLong, match="12 of them for videos"):
        engine.generate(asking([5] * 170 + [VIDEO], at(frames(1))), GREEDY)
    part = {"type": "video_url", "video_url": {"url": "https://example.invalid/a.mp4"}, "fps": 2}
    with pytest.raises(InvalidRequest, match=r"content\[0\] is a remote URL: send a data: URI"):
        engine.chat([{"role": "user", "content": [part]}], GREEDY)
    write_vision(tmp_path)
    with Rollout(tmp_path, **SETTINGS) as bare:
        with pytest.raises(InvalidRequest, match="its times cannot be written without a tokenizer"):
            bare.generate(asking(ONE, at(frames(1))), GREEDY)
        [output] = engine.generate(asking(ONE, at(frames(1))), GREEDY)
        [expanded] = bare.generate(asking(output.prompt_token_ids, at(frames(1))), GREEDY)
        assert ids_of(expanded) == ids_of(output)


def test_a_video_that_lasts_longer_than_positions_reach_is_refused(tmp_path):
    """Of a model that has times in its positions: they may be above the number of tokens."""
    model = write_vision(tmp_path, "qwen2_5_vl")
    video = frames(1, 8)
    with Rollout(tmp_path, max_model_len=100, **SETTINGS) as engine:
        [output] = engine.generate(asking(ONE, at(video, 0.26)), GREEDY)  # a time is 30 positions
        check_greedy(model, output, [], [(video, 0.26)])
        for fps, words in (
            (0.24, "until position 103, but"),
            (1e-300, "position 2.4e.301, .* rise by 4 in"),
        ):
            with pytest.raises(PromptTooLong, match=words):
                engine.generate(asking(ONE, at(video, fps)), GREEDY)


def test_times_are_written_once_each():
    one = TimedVideo(times=2, before=[[1, 8], [2, 8]], count=1, end=7)
    three = TimedVideo(times=1, before=[[3, 8]], count=3, end=7)
    written = [1, 8, 9, 7, 2, 8, 9, 7]
    assert timed([5, 9, 6], [one], 9, "it") == [5, *written, 6]
    assert timed([5, *written, 6], [one], 9, "it") == [5, *written, 6]
    assert timed([9, 9], [one, three], 9, "it") == [*written, 3, 8, 9, 7]
    done = [*written, 3, 8, 9, 9, 9, 7]
    assert timed(done, [one, three], 9, "it") == done
    assert timed([*done, 9], [one, three, one], 9, "it") == [*done, *written]


def test_settings_of_frames_are_found_as_transformers_finds_them(tmp_path):
    write_vision(tmp_path, "qwen2_5_vl")
    vision = ModelConfig.from_directory(tmp_path).vision

    def found():
        rules = FrameRules.read(str(tmp_path), vision)
        return rules.least, rules.most, rules.cap

    assert found() == (64, 2048, None)
    nested = {"size": {"longest_edge": 4096}, "cap_pixels_per_frame": True}
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": nested}))
    assert found() == (128 * 28 * 28, 4096, 128_000)
    (tmp_path / "processor_config.json").write_text("{}")
    (tmp_path / "video_preprocessor_config.json").unlink()
    file = tmp_path / "preprocessor_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "max_pixels": 1024}))
    assert found() == (64, 1024, None)


def test_a_model_whose_frames_are_not_read_here_still_sees_images(tmp_path):
    model = write_vision(tmp_path, tokenizer=True)
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "resample": 2}))
    with Rollout(tmp_path, **SETTINGS) as engine:
        words = "has videos, but video_preprocessor_config.json says resample 2, only 3 is served"
        with pytest.raises(InvalidRequest, match=words):
            engine.generate(asking(ONE, at(frames(1))), GREEDY)
        [output] = engine.generate(asking([5, START, PAD, END], image=picture(1)), GREEDY)
    check_greedy(model, output, [picture(1)])


def test_sizes_that_change_are_those_that_pillow_makes_but_for_a_level(tmp_path):
    """What is resized differs from an image's by rounding alone."""
    for kind, size in (("qwen3_vl", (45, 30)), ("qwen2_5_vl", (70, 51))):
        write_vision(tmp_path, kind)
        own_frames = frame_processor(tmp_path)
        video = as_video(at(frames(1, 2, *size)), "it")
        made = own_frames.patched(own_frames.open(video, "it"))
        pixels, grid = patches(frames(1, 2, *size))
        assert [list(one.grid) for one in made] == [grid]
        level = 1 / 255 / 0.26
        assert (made[0].pixels - pixels).abs().max() < 1.5 * level


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("cap", [None, 40])
def test_patches_are_bit_for_bit_those_of_transformers(tmp_path, kind, cap):
    """With torchvision, which only this test needs: transformers has no other for videos."""
    pytest.importorskip("torchvision")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    own = Qwen2VLVideoProcessor if "2_5" in kind else Qwen3VLVideoProcessor
    write_vision(tmp_path, kind)
    capped = {} if cap is None else {"cap_pixels_per_frame": True, "max_video_tokens": cap}
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    hf = own(size={"shortest_edge": 64, "longest_edge": 4096}, **sizes, **capped)
    hf.save_pretrained(tmp_path)
    own_frames = frame_processor(tmp_path)
    for shape in ((2, 30, 45), (5, 70, 51), (6, 100, 12), (4, 9, 9)):
        count, height, width = shape
        array = frames(1, count, width, height)
        wanted = hf(
            [array], do_sample_frames=False, return_tensors="pt",
            video_metadata=[{"fps": 2.0, "total_num_frames": count}],
        )  # fmt: skip
        opened = own_frames.open(as_video(at(array), "it"), "it")
        made = own_frames.patched(opened)
        assert list(opened.grid) == wanted["video_grid_thw"][0].tolist()
        assert torch.equal(torch.cat([m.pixels for m in made]), wanted["pixel_values_videos"])


def frame_processor(path):
    vision = ModelConfig.from_directory(path).vision
    return FrameProcessor(FrameRules.read(str(path), vision), vision, LIMITS, torch.float32)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_a_prompt_is_what_transformers_processor_makes_of_it(tmp_path, kind):
    """Ids, patches and times, by its own processor, and what its model says of those."""
    pytest.importorskip("torchvision")
    from transformers import AutoTokenizer, Qwen2_5_VLProcessor, Qwen3VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    whole = "2_5" in kind
    model = write_vision(tmp_path, kind, tokenizer=True)
    videos = (Qwen2VLVideoProcessor if whole else Qwen3VLVideoProcessor).from_pretrained(tmp_path)
    hf = (Qwen2_5_VLProcessor if whole else Qwen3VLProcessor)(
        processor(), AutoTokenizer.from_pretrained(tmp_path), videos
    )
    shown = [frames(1, 5, 45, 30), frames(2, 4, 70, 51)]
    said = [
        {"fps": 3.0, "total_num_frames": 5, "frames_indices": [0, 1, 2, 3, 4]},
        {"fps": 24.0, "total_num_frames": 100, "frames_indices": [0, 33, 66, 99]},
    ]
    text = "Look <|vision_start|><|video_pad|><|vision_end|> and <|image_pad|>:<|video_pad|>!"
    given = hf(
        text=[text], images=[picture(1)], videos=shown, video_metadata=said,
        do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip
    seen = {"image": picture(1), "video": list(zip(shown, said, strict=True))}
    with Rollout(tmp_path, **SETTINGS) as engine:
        [output] = engine.generate({"prompt": text, "multi_modal_data": seen}, GREEDY)
    assert output.prompt_token_ids == given["input_ids"][0].tolist()
    given.pop("attention_mask")
    with torch.no_grad():
        logits = model(use_cache=False, **given).logits[0, -1]
    wanted = logits.float().log_softmax(-1)
    assert wanted.argmax() == ids_of(output)[0]
    assert abs(wanted.max() - output.outputs[0].logprobs.raw[0]) < 1e-4
