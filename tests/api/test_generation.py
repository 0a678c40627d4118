"""The same verbs, embedded and over gRPC."""

import asyncio
import contextlib
import inspect
import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from api.conftest import ENGINE
from shared_engines import standing_still

from rollout import AsyncRollout, Rollout, SamplingParams
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    PromptTooLong,
)
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import conversation_to_proto, params_to_proto, prompt_to_proto
from rollout.server.auth import Tokens
from rollout.server.grpc.services import GenerationService

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
MIXED = ["The quick brown", [1, 2, 3], "Hello"]


@pytest.fixture(params=["embedded", "served"])
def face(request, engine):
    if request.param == "embedded":
        yield engine
        return
    with Rollout.connect(engine.address, timeout=10) as client:
        yield client


def test_served_and_embedded_give_the_same_bits(engine, client):
    params = [
        SamplingParams(max_tokens=9, seed=3, logprobs=3, prompt_logprobs=2),
        SamplingParams(max_tokens=9, seed=4, n=3, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=9, temperature=0.0, stop=("x",)),
    ]
    ids = ["a", "b", "c"]
    engine.reset_prefix_cache()
    here = engine.generate(MIXED, params, request_ids=ids)
    engine.reset_prefix_cache()
    there = client.generate(MIXED, params, request_ids=ids)
    assert here == there
    assert [out.request_id for out in there] == ids
    assert there[0].outputs[0].logprobs.top
    assert there[0].prompt_logprobs[0] is None
    assert len(there[1].outputs) == 3


def test_one_prompt_and_many_come_back_in_order(face):
    [alone] = face.generate([1, 2, 3], GREEDY)
    many = face.generate([[3, 2, 1], [1, 2, 3], [9]], GREEDY)
    assert [out.prompt_token_ids for out in many] == [[3, 2, 1], [1, 2, 3], [9]]
    assert many[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert face.generate([], GREEDY) == []


def test_text_is_tokenised_where_the_model_is(face):
    [out] = face.generate("The quick brown", GREEDY)
    assert out.prompt == "The quick brown"
    assert out.prompt_token_ids == face.tokenize("The quick brown")
    assert isinstance(out.outputs[0].text, str)
    with pytest.raises(InvalidRequest, match="the prompt is not Unicode text"):
        face.tokenize("half a \ud800 pair")


def test_what_has_no_form_on_the_wire_is_named(client):
    with pytest.raises(InvalidRequest, match="request_ids must be a text"):
        client.abort("\ud800")
    with pytest.raises(InvalidRequest, match="server_path is not Unicode text"):
        client.update_weights(server_path="\udcff")


def begun(face, params):
    """A stream, and its first part."""
    stream = face.stream([1, 2, 3], params)
    return stream, next(stream)


def test_a_stream_is_cumulative_and_ends_with_the_whole_answer(face, engine):
    # A part carries all that has come since the last was read: few tokens may come at once.
    params = replace(LONG, temperature=0.0)
    [whole] = face.generate([1, 2, 3], params)
    stream, first = standing_still(lambda: begun(face, params), engine, running=1)
    engine.resume_generation()
    parts = [first, *stream]
    lengths = [len(part.outputs[0].token_ids) for part in parts]
    assert lengths == sorted(lengths)
    assert len(parts) > 1
    assert parts[-1].finished
    assert parts[-1].outputs == whole.outputs


def test_leaving_a_stream_early_aborts_its_request(face, engine, eventually):
    stream, part = standing_still(lambda: begun(face, LONG), engine, running=1)
    assert not part.finished
    stream.close()
    eventually(lambda: engine.metrics().running == 0)  # though it stands still
    engine.resume_generation()


def test_chat_renders_the_template_and_answers(face):
    messages = [{"role": "user", "content": "hello"}]
    [out] = face.chat(messages, GREEDY)
    assert out.prompt_token_ids == face.tokenize(messages)
    both = face.chat([messages, messages], GREEDY)
    for again in both:
        assert again.outputs[0].token_ids == out.outputs[0].token_ids


def test_content_in_parts_of_text_is_that_text_for_any_template(face):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    [out] = face.chat([{"role": "user", "content": parts}], GREEDY)
    assert out.prompt == face.render([{"role": "user", "content": "hello"}])
    turn = face.session().chat([{"role": "user", "content": parts}])
    assert turn.prompt_token_ids == out.prompt_token_ids
    assert face.render([{"role": "user", "content": tuple(parts)}]) == out.prompt


def test_a_chat_goes_on_with_its_final_message_where_it_is_asked_to(face):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "One two"}]
    [out] = face.chat(messages, GREEDY, continue_final_message=True)
    assert out.prompt.endswith("assistant\nOne two")
    assert out.prompt_token_ids == face.tokenize(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="template takes no tools"):
        face.chat(messages, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(InvalidRequest, match="did you mean 'tools'"):
        face.chat(messages, tool=[])


def test_metrics_and_server_info_have_the_same_face(face, engine, checkpoint):
    assert face.metrics().num_kv_blocks == 128
    info = face.server_info()
    assert (info.model, info.max_model_len, info.has_tokenizer) == (checkpoint, 512, True)
    assert face.weight_version == engine.weight_version == info.version


@pytest.mark.parametrize(
    ("prompts", "params", "error", "names"),
    [
        ([[1, 10_000]], GREEDY, InvalidRequest, "10000"),
        ([[-1]], GREEDY, InvalidRequest, "-1"),
        ([[1] * 600], GREEDY, PromptTooLong, "512"),
        ([[1], [2]], [GREEDY] * 3, InvalidRequest, "3 sampling parameters for 2 prompts"),
        ([3.5], GREEDY, InvalidRequest, "prompt 0"),
        (7, GREEDY, InvalidRequest, "int"),
        ([True], GREEDY, InvalidRequest, "prompt 0"),
        ([[1]], {"max_token": 3}, InvalidRequest, "did you mean 'max_tokens'"),
        ([{"role": "user", "content": "a"}], None, InvalidRequest, r"use chat\(messages\)"),
        ([[1]], "greedy", InvalidRequest, "SamplingParams"),
        ([[1]], [GREEDY, 5][1:], InvalidRequest, "SamplingParams"),
        ([["a"] * 600], GREEDY, PromptTooLong, "600"),
        ([["a"]], GREEDY, InvalidRequest, "prompt 0"),
    ],
)
def test_bad_requests_raise_the_same_error_on_both_faces(face, prompts, params, error, names):
    with pytest.raises(error, match=names):
        face.generate(prompts, params)


def test_a_dict_stands_for_sampling_parameters(face):
    (out,) = face.generate([[1, 2]], {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True})
    assert len(out.outputs[0].token_ids) == 3


def test_a_text_that_cannot_fit_is_refused_without_being_tokenised(face):
    with pytest.raises(PromptTooLong, match="3000000 characters"):
        face.generate("a" * 3_000_000, GREEDY)


def test_one_id_may_be_aborted_without_a_list(face, engine, eventually):
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(face.generate([1, 2], LONG, request_ids=["alone"]))
    )
    engine.pause_generation()
    thread.start()
    eventually(lambda: engine.metrics().running + engine.metrics().waiting == 1)
    assert face.abort("alone") == 1
    engine.resume_generation()
    thread.join(60)
    assert [out.outputs[0].finish_reason for out in results] == ["abort"]


def test_one_id_of_several_prompts_ends_them_all(face, engine, eventually):
    results = []
    asked = {"request_ids": "both"}
    thread = threading.Thread(
        target=lambda: results.extend(face.generate([[1, 2], [3, 4]], LONG, **asked))
    )
    engine.pause_generation()
    thread.start()
    eventually(lambda: engine.metrics().running + engine.metrics().waiting == 2)
    assert face.abort("bot") == 0
    assert face.abort(["both", "both-1"]) == 2
    engine.resume_generation()
    thread.join(60)
    assert [out.request_id for out in results] == ["both-0", "both-1"]
    assert [out.outputs[0].finish_reason for out in results] == ["abort", "abort"]
    assert face.abort("both") == 0


def test_what_waits_for_a_version_is_seen_and_aborted(face, engine, eventually):
    results = []
    later = {"max_tokens": 8, "min_version": engine.weight_version + 1}
    thread = threading.Thread(
        target=lambda: results.extend(face.generate([[1, 2], [3, 4]], later, request_ids="late"))
    )
    thread.start()
    eventually(lambda: engine.metrics().waiting == 2)
    assert face.abort("late-0") == 1
    assert face.abort("late-0") == 0
    assert thread.is_alive()
    assert face.abort() == 1
    thread.join(60)
    assert [out.prompt_token_ids for out in results] == [[1, 2], [3, 4]]
    for sample in (out.outputs[0] for out in results):
        assert (sample.finish_reason, sample.token_ids, sample.text) == ("abort", [], "")
    assert engine.metrics().waiting == 0


def test_equal_request_ids_in_one_call_are_refused(face):
    with pytest.raises(InvalidRequest, match="differ"):
        face.generate([[1], [2]], GREEDY, request_ids=["x", "x"])


def test_a_text_prompt_without_a_tokenizer_is_refused(bare_checkpoint):
    with Rollout(bare_checkpoint, device="cpu", num_threads=1, num_kv_blocks=32) as rollout:
        with pytest.raises(InvalidRequest, match="tokenizer"):
            rollout.generate("text", GREEDY)
        assert rollout.generate([1, 2], GREEDY)[0].outputs[0].text == ""


def test_abort_ends_requests_by_id_and_all_at_once(face, engine, eventually):
    results = []
    threads = [
        threading.Thread(
            target=lambda i=i: results.extend(face.generate([1, i], LONG, request_ids=[f"r{i}"]))
        )
        for i in (1, 2, 3)
    ]
    engine.pause_generation()
    for thread in threads:
        thread.start()
    eventually(lambda: engine.metrics().running + engine.metrics().waiting == 3)
    assert face.abort(["r2", "unknown"]) == 1
    assert face.abort() == 2
    engine.resume_generation()
    for thread in threads:
        thread.join(60)
    assert sorted(out.request_id for out in results) == ["r1", "r2", "r3"]
    assert {out.outputs[0].finish_reason for out in results} == {"abort"}


def test_ctrl_c_ends_the_wait_and_aborts_the_request(face, engine, eventually):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    engine.pause_generation()
    try:

        def interrupt():
            eventually(lambda: engine.metrics().running + engine.metrics().waiting)
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=interrupt)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            face.generate([1, 2, 3], LONG)
        pressing.join()
        eventually(lambda: engine.metrics().running + engine.metrics().waiting == 0)
    finally:
        signal.signal(signal.SIGINT, before)
        engine.resume_generation()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
def test_ctrl_c_anywhere_within_a_clients_call_leaves_its_connection_to_others(engine):
    def interrupt(_signal, _frame):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    armed, draw = set(), random.Random(3)
    before = signal.signal(signal.SIGALRM, interrupt)
    client = Rollout.connect(engine.address)
    client.weight_info()
    other = threading.Thread(target=client.weight_info, daemon=True)  # may never end
    try:
        for _ in range(400):
            # In the midst of a wait for a condition Python itself makes a RuntimeError of it.
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                armed.add(1)
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-3))
                client.weight_info()
                armed.clear()
        other.start()
        other.join(30)
        assert not other.is_alive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    client.shutdown()


def test_pause_sleep_and_wake_are_obeyed(face):
    face.pause_generation("wait")
    assert face.metrics().state == "paused"
    face.resume_generation()
    face.sleep(1)
    with pytest.raises(EngineClosed, match="asleep"):
        face.generate([1], GREEDY)
    face.wake_up([])
    assert face.metrics().state == "asleep", "nothing was to be woken"
    face.wake_up()
    face.reset_prefix_cache()
    assert face.generate([1], GREEDY)[0].finished
    face.sleep(1, "wait")
    assert face.metrics().state == "asleep"
    face.wake_up()
    with pytest.raises(InvalidRequest, match="keep, wait, abort"):
        face.sleep(mode="maybe")
    assert face.generate([1], GREEDY)[0].finished
    with pytest.raises(InvalidRequest, match="keep, recompute, wait, abort"):
        face.pause_generation("maybe")
    for verb in (face.pause_generation, lambda mode: face.sleep(mode=mode)):
        with pytest.raises(InvalidRequest, match="mode must be a text, such as 'keep', got ''"):
            verb("")
    with pytest.raises(InvalidRequest, match="reset_running_requests must be True or False"):
        face.reset_prefix_cache("no")


def test_what_runs_at_a_sleep_ends_as_its_mode_says(face, engine):
    def begun_stream():
        stream = face.stream([1, 2, 3], LONG)
        next(stream)
        return stream

    stream = begun_stream()
    engine.pause_generation()
    try:
        with pytest.raises(DeadlineExceeded):
            face.sleep(mode="wait", timeout=0.1)
        assert engine.metrics().state == "paused", "what runs cannot finish: it stays awake"
        face.sleep(mode="abort")
        assert [*stream][-1].outputs[0].finish_reason == "abort"
        face.wake_up()
    finally:
        engine.resume_generation()
    stream = begun_stream()
    face.sleep(mode="wait")
    assert [*stream][-1].outputs[0].finish_reason == "length"
    face.wake_up()


def test_a_closed_rollout_says_so(engine):
    client = Rollout.connect(engine.address, timeout=5)
    client.shutdown()
    client.shutdown()
    with pytest.raises(EngineClosed, match="shut down"):
        client.generate([1], GREEDY)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:", "http://a/b", ":50051"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="host:port"):
        Rollout.connect(address)


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        Rollout("model", tensor_parallel_sise=2)


def test_a_failed_start_leaves_no_thread(tmp_path, eventually):
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        Rollout(str(tmp_path / "missing"), device="cpu")
    # The thread that loads tells of its failure, and then ends.
    eventually(lambda: set(threading.enumerate()) <= before)


async def test_the_async_face_runs_calls_together_and_cancels(engine, eventually):
    async with AsyncRollout.connect(engine.address, timeout=10) as rollout:
        outs = await asyncio.gather(*(rollout.generate([1, n], GREEDY) for n in range(4)))
        assert [out.prompt_token_ids for [out] in outs] == [[1, n] for n in range(4)]
        assert await rollout.weight_version == engine.weight_version
        assert await rollout.address == engine.address
        engine.pause_generation()
        task = asyncio.create_task(rollout.generate([1, 2], LONG))
        await asyncio.to_thread(
            eventually, lambda: engine.metrics().running + engine.metrics().waiting
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.resume_generation()
        parts = [part async for part in rollout.stream([1, 2], GREEDY)]
        assert parts[-1].finished
    await asyncio.to_thread(
        eventually, lambda: engine.metrics().running + engine.metrics().waiting == 0
    )


def test_an_engine_loads_once_for_loops_that_come_together_or_go_on_without_it(
    bare_checkpoint: str,
) -> None:
    """In a notebook each cell may run a loop of its own."""

    def begun(rollout: AsyncRollout) -> list[int]:
        asyncio.run(rollout.start())
        [out] = asyncio.run(rollout.generate([1, 2], GREEDY))
        return out.outputs[0].token_ids

    async def given_up(rollout: AsyncRollout) -> None:
        starting = asyncio.ensure_future(rollout.start())
        await asyncio.sleep(0)
        starting.cancel()

    rollout = AsyncRollout(bare_checkpoint, **ENGINE)
    asyncio.run(given_up(rollout))
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(begun, [rollout] * 4)
    assert len(first) == 8
    assert others == [first] * 3
    asyncio.run(rollout.shutdown())


async def test_the_async_face_owns_an_engine(checkpoint):
    async with AsyncRollout(checkpoint, device="cpu", num_threads=1, num_kv_blocks=32) as rollout:
        [out] = await rollout.generate([1, 2, 3], GREEDY)
        assert out.finished
        assert (await rollout.weight_info()).version == 0


FORGETFUL = """
import sys
from rollout import Rollout, SamplingParams
rollout = Rollout(sys.argv[1], device="cpu", num_threads=1, num_kv_blocks=32)
client = Rollout.connect(rollout.address)
print(len(client.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))))
"""


def test_a_script_that_forgets_to_shut_down_ends_cleanly(bare_checkpoint):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORGETFUL, bare_checkpoint],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_shutdown_leaves_no_thread(bare_checkpoint):
    before = set(threading.enumerate())
    with Rollout(bare_checkpoint, device="cpu", num_threads=1, num_kv_blocks=32) as rollout:
        with Rollout.connect(rollout.address, timeout=5) as client:
            client.generate([1, 2], GREEDY)
            client.weight_info()
        rollout.abort()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("rollout")}


async def test_who_leaves_a_stream_leaves_nothing_to_the_garbage_collector(checkpoint) -> None:
    """A request would run on until its generator is collected."""
    conversation = [{"role": "user", "content": "Hello"}]
    async with AsyncRollout(checkpoint, **ENGINE) as rollout:
        service = GenerationService(rollout, Tokens())
        streams = {
            "prompts": lambda: rollout.stream_many([[1, 2, 3]], LONG),
            "chat": lambda: rollout.stream_chat(conversation, LONG),
            "gRPC": lambda: service.Generate(
                pb.GenerateRequest(
                    prompts=[prompt_to_proto([1, 2, 3], "a")],
                    params=[params_to_proto(LONG)],
                    stream=True,
                ),
                None,
            ),
            "gRPC chat": lambda: service.Chat(
                pb.ChatRequest(
                    conversations=[conversation_to_proto(conversation, "b")],
                    params=[params_to_proto(LONG)],
                    stream=True,
                ),
                None,
            ),
        }
        for way, make in streams.items():
            left, hooks = [], sys.get_asyncgen_hooks()
            sys.set_asyncgen_hooks(finalizer=left.append)
            try:
                stream = make()
                await anext(stream)
                await stream.aclose()
            finally:
                sys.set_asyncgen_hooks(*hooks)
            assert left == [], way
            assert await rollout.abort() == 0, way


@pytest.mark.parametrize("face", ["engine", "client"])
def test_arguments_in_another_engines_words_are_taken_or_told_in_ours(face, request) -> None:
    rollout = request.getfixturevalue(face)
    asked = {"temperature": 0.0, "max_tokens": 3}
    [plain] = rollout.generate([[5, 6, 7]], asked)
    [theirs] = rollout.generate([[5, 6, 7]], sampling_params=SamplingParams(**asked))
    assert theirs.outputs[0].token_ids == plain.outputs[0].token_ids
    wrong = [
        (lambda: rollout.generate([[5]], asked, sampling_params=asked), "give one of them"),
        (lambda: rollout.generate([[5]], max_tokens=3), "takes no 'max_tokens'; it goes into Samp"),
        (lambda: rollout.generate(prompt="a"), "generate takes no 'prompt'; here it is 'prompts'"),
        (lambda: rollout.generate("a", use_tqdm=False), "no bar is drawn"),
        (lambda: rollout.stream("a", temperature=1.0), "it goes into SamplingParams"),
        (lambda: rollout.chat([{"role": "user"}], max_new_tokens=3), "it goes into SamplingParams"),
        (lambda: rollout.score(["ab"], top_logprob=3), "did you mean 'top_logprobs'?"),
        (lambda: rollout.pause_generation(wait=True), "known: mode, timeout"),
    ]
    for call, words in wrong:
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            call()
    with pytest.raises(ConfigError, match="takes no 'state_dict'; here it is 'source'"):
        rollout.update_weights(state_dict={})
    with pytest.raises(ConfigError, match="takes no 'adapter'; did you mean 'adapters'"):
        rollout.update_weights({}, adapter={})
    with pytest.raises(InvalidRequest, match=r"takes no 'timeout'; end it by Ctrl-C"):
        rollout.generate([[5]], timeout=3)


def test_methods_of_other_engines_are_told_in_ours(face) -> None:
    for name, here in {
        "close": "shutdown()",
        "is_sleeping": "asleep",
        "detokenize": "the text of an output",
        "tokenizer": "tokenize",
        "llm_engine": "the verbs themselves",
    }.items():
        with pytest.raises(AttributeError, match=rf"^Rollout has no '{name}'; here it is .*{here}"):
            getattr(face, name)
    with pytest.raises(AttributeError, match=r"^Rollout has no 'whatever'$"):
        face.whatever  # noqa: B018
    assert not hasattr(face._async, "load_weights")


def test_a_wrong_prompt_among_several_is_named_by_its_index(face) -> None:
    with pytest.raises(InvalidRequest, match=r"^request '[0-9a-f]{32}-1': token id 99999 "):
        face.generate([[1, 2], [1, 99999], [3]])
    assert {o.request_id[-2:] for o in face.generate([[1], [2]], GREEDY)} == {"-0", "-1"}
    assert len(face.generate([[1]], GREEDY)[0].request_id) == 32


HI = [{"role": "user", "content": "Hi"}]


def in_part(part):
    return [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]


WRONG = [
    (lambda r: r.generate(b"hi"), "prompts must be a text"),
    (lambda r: r.generate(["a", b"hi"]), "prompt 1 is neither"),
    (lambda r: r.generate(torch.tensor([1, 2])), "not Tensor: send its tolist()"),
    (lambda r: r.generate([torch.tensor([1, 2])]), "list of token ids: send its tolist()"),
    (lambda r: r.generate([["a", "b"]]), "it is a list of texts, where one text goes"),
    (lambda r: r.generate([np.int64(1)]), "send [int(token) for token in ids]"),
    (lambda r: r.generate([[np.int64(1)]]), "send [int(token) for token in ids]"),
    (lambda r: r.generate({"input_ids": [[1]], "attention_mask": [[1]]}), 'its ["input_ids"]'),
    (lambda r: r.generate(["a", "b"], request_ids=["xy"]), "1 request ids for 2 prompts"),
    (lambda r: r.generate("a", request_ids=5), "request_ids must be a list of texts, got 5"),
    (lambda r: r.generate("a", images=3), "images must be a list, got 3"),
    (lambda r: r.chat(["hi"]), "a conversation is a list"),
    (lambda r: r.chat([{}]), 'message 0 must be a {"role"'),
    (lambda r: r.chat([{"role": "user", "content": 3}]), "content of message 0 must be a text"),
    (
        lambda r: r.chat(in_part({"type": "audio", "audio": "x"})),
        "[0] is a part of type 'audio'; on",
    ),
    (
        lambda r: r.generate({"prompt": "a", "multi_modal_data": {"audio": b"x"}}),
        'multi_modal_data must be {"image": ..., "video": ...}',
    ),
    (
        lambda r: r.generate({"prompt": "a", "multi_modal_data": {"video": ([b"x"], {"fps": 1})}}),
        "the prompt has videos, but",
    ),
    (
        lambda r: r.chat(in_part({"type": "video", "video": "x"})),
        "[0] of type 'video_url' needs a video_url",
    ),
    (lambda r: r.chat(in_part({"type": "text", "txt": "x"})), "[0] is a part of type 'text'; only"),
    (lambda r: r.render(in_part("x")), "messages[0].content[0] is a part of type 'str'; only"),
    (lambda r: r.chat(HI, add_generation_prompt="no"), "add_generation_prompt must be true or"),
    (lambda r: r.render("hi"), "a conversation is a list"),
    (lambda r: r.tokenize(3), "a conversation is a list"),
    (lambda r: r.tokenize("a", add_special_tokens="no"), "add_special_tokens must be"),
    (lambda r: r.embed("a", dimensions="3"), "dimensions must be 1 or more, got '3'"),
    (lambda r: r.embed("a", pooling=[]), "pooling must be one of last, mean"),
    (lambda r: r.score(["abc"], last_n="1"), "last_n must be at least 1"),
    (lambda r: r.abort([3]), "request_ids must be a text"),
    (lambda r: r.pause_generation(3), "pause mode must be a text"),
    (lambda r: r.sleep("1"), "sleep level must be 1 or 2, got '1'"),
    (lambda r: r.sleep(True), "sleep level must be 1 or 2, got True"),
    (lambda r: r.wake_up(3), "tags must be a text"),
    (lambda r: r.session().chat(HI, max_tokens=3), "it goes into SamplingParams"),
    (lambda r: r.load_lora_adapter(3, "nowhere"), "name of an adapter must be a text"),
    (lambda r: r.serve(3), "serve takes a host and a port"),
    (lambda r: r.serve(port=-1), "serve takes a host and a port"),
    (lambda r: r.serve("0.0.0.0", token="t"), "already; an engine has one gRPC server"),
    (lambda r: r.update_weights({}, bucket_bytes="1"), "bucket_bytes must be"),
    (lambda r: r.update_weights({}, anchor_every="x"), "anchor_every must be an integer"),
    (lambda r: r.update_weights({}, label=3), "label must be a text, got 3"),
    (lambda r: r.update_weights({}, partial="no"), "partial must be True or False"),
]


def test_values_of_a_wrong_type_are_named_and_nothing_is_done(engine, client) -> None:
    engine.address  # noqa: B018  it is served
    for rollout in (engine, client):
        for number, (call, words) in enumerate(WRONG):
            if rollout is client and "adapter" in words:
                continue
            with pytest.raises((InvalidRequest, ConfigError)) as caught:
                call(rollout)
            assert words in str(caught.value), number
        rollout.wake_up("weights")  # as ["weights"]; nothing was asleep
    assert engine.metrics().state == "running"


def test_what_is_no_address_token_or_certificate_is_told_before_a_connection() -> None:
    for address in (None, 50051, ("127.0.0.1", 50051), "127.0.0.1:99999", "127.0.0.1:0"):
        with pytest.raises(ConfigError, match="is not host:port"):
            Rollout.connect(address)
    for token in (50051, "a b", "\u00e9"):
        with pytest.raises(ConfigError, match="the token must be a text"):
            Rollout.connect("127.0.0.1:1", token)
    with pytest.raises(ConfigError, match=r"host:port.*; leave out http:// and give the gRPC port"):
        Rollout.connect("http://127.0.0.1:15051")
    with pytest.raises(ConfigError, match=r"one text: connect\('localhost:15051'\)"):
        Rollout.connect("localhost", 15051)
    for face in (Rollout, AsyncRollout):
        with pytest.raises(InvalidRequest, match="takes no 'tokn'; did you mean 'token'"):
            face.connect("127.0.0.1:1", tokn="x")
    with pytest.raises(ConfigError, match="tls must be a ClientTls"):
        Rollout.connect("127.0.0.1:1", tls=True)


def test_verbs_of_an_event_loop_are_of_their_kind_to_who_asks() -> None:
    for name in ("generate", "abort", "pause_generation", "metrics"):
        assert inspect.iscoroutinefunction(getattr(AsyncRollout, name))
    for name in ("stream", "stream_many", "stream_chat"):
        assert inspect.isasyncgenfunction(getattr(AsyncRollout, name))
