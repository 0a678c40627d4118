"""Nouns of generation survive their protobuf forms."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequest, TransferFailed
from rollout.generation import (
    Completion,
    Logprobs,
    PackedScores,
    RequestOutput,
    SamplingParams,
    VersionSpan,
    Video,
    VideoFile,
    VisualPrompt,
    Visuals,
)
from rollout.generation.metrics import EngineStats, HistogramSnapshot
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import (
    messages_from_json,
    output_from_proto,
    output_to_proto,
    params_from_proto,
    params_to_proto,
    prompt_from_proto,
    prompt_to_proto,
    stats_from_json,
    stats_to_json,
)

PARAMS = [
    SamplingParams(),
    SamplingParams(max_tokens=None, seed=0, temperature=0.0),
    SamplingParams(logit_bias={}, logprobs=0, prompt_logprobs=5),
    SamplingParams(
        n=3, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=-1.5,
        frequency_penalty=2.0, repetition_penalty=1.3, logit_bias={3: -100.0, 7: 0.5}, seed=-7,
        stop=("a", "é"), stop_token_ids=(1, 2), include_stop_str_in_output=True, ignore_eos=True,
        min_tokens=4, max_tokens=2**40, logprobs=20, skip_special_tokens=False,
    ),
    SamplingParams(detokenize=False, hidden_state=True),
    SamplingParams(
        max_tokens=0, prompt_logprobs=3, prompt_logprobs_start=7, prompt_temperature=0.5
    ),
]  # fmt: skip


def through(message):
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("params", PARAMS)
def test_sampling_parameters_survive(params):
    assert params_from_proto(through(params_to_proto(params))) == params


def test_fields_a_foreign_client_leaves_out_take_our_defaults():
    assert params_from_proto(pb.SamplingParams(json=b'{"top_k": -1}')) == SamplingParams()


def test_the_widest_integers_admitted_fit_their_fields():
    for seed in (-1 << 63, (1 << 63) - 1):
        params = SamplingParams(seed=seed, max_tokens=(1 << 63) - 1, logprobs=(1 << 63) - 1)
        assert params_from_proto(through(params_to_proto(params))) == params


@pytest.mark.parametrize("prompt", ["", "héllo", [], [1, 2, 3]])
def test_prompts_survive(prompt):
    assert prompt_from_proto(through(prompt_to_proto(prompt, "id"))) == prompt


@pytest.mark.parametrize("prompt", ["\ud800", [1 << 64], ["a"]])
def test_a_prompt_that_has_no_wire_form_is_an_invalid_request(prompt):
    with pytest.raises(InvalidRequest, match="request id-7"):
        prompt_to_proto(prompt, "id-7")


def test_what_a_prompt_shows_survives():
    video = Video(frames=(b"a", b"b"), times=(0.1, 1 / 3), rate=2.5)
    file = VideoFile(data=b"d", fps=0.1, min_frames=3, do_sample_frames=False)
    prompt = VisualPrompt([1, 2], Visuals(images=(b"c",), videos=(video, file)))
    assert prompt_from_proto(through(prompt_to_proto(prompt, "id"))) == prompt
    for wrong in (pb.Video(frames=[b"a"], rate=1), pb.Video(), pb.Video(rate=float("nan"))):
        with pytest.raises(InvalidRequest, match="a time for each frame, and a rate above 0"):
            prompt_from_proto(pb.Prompt(text="a", videos=[wrong]))


def test_a_prompt_of_no_kind_is_an_invalid_request():
    with pytest.raises(InvalidRequest, match="text"):
        prompt_from_proto(pb.Prompt())


UNREADABLE = [
    (
        pb.Completion(
            logprobs=pb.Logprobs(has_top=True, top=[pb.TokenLogprobs(present=True, token_ids=[1])])
        ),
        "ids and logprobs differ",
    ),
    (pb.Completion(sampling_mask=pb.SamplingMask(counts=[3])), "counts are not those"),
    (pb.Completion(routed_experts=pb.PackedArray(dtype="object")), "array of 'object'"),
]


@pytest.mark.parametrize(("delivered", "words"), UNREADABLE)
def test_what_was_delivered_of_a_prompt_is_refused_where_it_cannot_be_read(delivered, words):
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[1]), delivered=[delivered])
    with pytest.raises(InvalidRequest, match=f"delivered of a request: .*{words}"):
        prompt_from_proto(prompt)


@pytest.mark.parametrize("data", [b"{", b'{"role": 1}', b"[1]"])
def test_messages_that_are_no_list_of_objects_are_refused(data):
    with pytest.raises(InvalidRequest, match="messages_json"):
        messages_from_json(data)


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


floats = st.floats(width=32, allow_nan=False)
tops = st.dictionaries(st.integers(0, 1 << 40), floats, max_size=3)
spans = st.lists(st.builds(VersionSpan, *[st.integers(0, 1 << 40)] * 3), max_size=2).map(tuple)
logprobs = st.builds(
    Logprobs,
    *[st.lists(floats, max_size=4)] * 3,
    st.none() | st.lists(tops, max_size=3),
)
completions = st.builds(
    Completion,
    index=st.integers(0, 9),
    text=st.text(max_size=8),
    token_ids=st.lists(st.integers(0, 1 << 40), max_size=5),
    logprobs=logprobs,
    cumulative_logprob=st.floats(allow_nan=False),
    finish_reason=st.none() | st.sampled_from(("stop", "length", "abort")),
    stop_reason=st.none() | st.integers(0, 1 << 40) | st.text(min_size=1, max_size=4),
    weight_versions=spans,
    kv_spans=spans,
    staleness=st.integers(0, 1 << 40),
    adapter=st.text(max_size=8),
)


def packed(start, count, top):
    ids = np.arange(count * top, dtype=np.int32).reshape(count, top)
    return PackedScores(
        start=start,
        logprobs=-np.arange(count, dtype=np.float32) / 3,
        top_ids=ids,
        top_logprobs=ids.astype(np.float32) / -7,
    )


outputs = st.builds(
    RequestOutput,
    request_id=st.text(max_size=8),
    prompt=st.none() | st.text(max_size=8),
    prompt_token_ids=st.lists(st.integers(0, 1 << 40), max_size=5),
    prompt_logprobs=st.none() | st.lists(st.none() | tops, max_size=3),
    outputs=st.lists(completions, max_size=2),
    finished=st.booleans(),
    num_cached_tokens=st.integers(0, 1 << 40),
    epoch=st.integers(0, (1 << 64) - 1),
    hidden_state=st.none() | st.lists(floats, min_size=1, max_size=4),
    scores=st.none() | st.builds(packed, st.integers(0, 9), st.integers(0, 3), st.integers(0, 3)),
)


@settings(max_examples=60, deadline=None)
@given(outputs)
def test_outputs_survive_bit_for_bit(output):
    assert output_from_proto(through(output_to_proto(output))) == output


def test_packed_scores_that_do_not_fit_are_named():
    message = pb.RequestOutput(scores=pb.PackedScores(logprobs=b"1234", top=2, top_ids=b"1234"))
    with pytest.raises(TransferFailed, match="arrays do not fit"):
        output_from_proto(message)


def test_the_order_of_alternatives_survives():
    top = {5: -0.5, 3: f32(-1.7), 9: -3.0}
    completion = Completion(
        index=0, text="", token_ids=[5], logprobs=Logprobs([0.0], [0.0], [0.0], [top]),
        cumulative_logprob=0.0, finish_reason=None, stop_reason=None, weight_versions=(),
        kv_spans=(),
    )  # fmt: skip
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[], prompt_logprobs=None,
        outputs=[completion], finished=False, num_cached_tokens=0,
    )  # fmt: skip
    back = output_from_proto(through(output_to_proto(output)))
    assert list(back.outputs[0].logprobs.top[0].items()) == list(top.items())


def test_figures_of_an_engine_survive():
    histogram = HistogramSnapshot((0.1, 1.0), (1, 2, 3), 4.5)
    stats = EngineStats(
        state="running", running=1, waiting=2, kv_usage=0.5, num_kv_blocks=9,
        prompt_tokens_total=1, generation_tokens_total=2, steps_total=3, preemptions_total=4,
        prefix_cache_queries_total=5, prefix_cache_hits_total=6,
        requests_finished={"stop": 1, "length": 2}, nan_logits_total=12, epoch=7, seed=11,
        weight_version=8,
        weight_updates_total=9, weight_updates_failed_total=10, last_stall_seconds=0.25,
        time_to_first_token=histogram, inter_token=histogram, weight_update_errors=("u: why",),
        staleness=histogram, stale_recomputed_total=1, adapters={"math": 3},
    )  # fmt: skip
    assert stats_from_json(stats_to_json(stats)) == stats
    told = json.loads(stats_to_json(replace(stats, weight_update_errors=())))
    assert "weight_update_errors" not in told  # older peers know none
    newer = json.dumps({**told, "figure_of_tomorrow": 1}).encode()
    assert stats_from_json(newer) == replace(stats, weight_update_errors=())
