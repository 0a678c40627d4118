"""Conversations of several turns: what was sampled is never tokenised again."""

import asyncio
import itertools
import json
import tempfile
import threading
import uuid
from contextlib import aclosing
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from shared_engines import eventually, standing_still
from tiny_models import write_tiny

from rollout import AsyncRollout, InvalidRequest, PromptTooLong, Rollout, SamplingParams
from rollout.api.sessions.session_store import Sessions
from rollout.server.http.app import build_app

# As templates of reasoning models are: tool results are grouped under one header, thoughts of
# earlier answers are left out, and the answers' ends are trimmed.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<r>
{{ m.content }}
</r>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- elif m.role == "assistant" %}<|im_start|>assistant
{{ m.content.split("</think>")[-1].strip() }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [{"name": "add"}]
USER = {"role": "user", "content": "add 1 and 2"}
START, END = 1, 2  # <|im_start|>, <|im_end|>
# Turns end by the end token, by a stop string, or cut short, one after the other.
ENDS = [
    {"logit_bias": {END: 100.0}, "min_tokens": 4},
    {"max_tokens": 5},
    {"stop": tuple("aeiouts 0"), "max_tokens": 12},
]


def result(turn):
    return {"role": "tool", "content": json.dumps({"turn": turn, "sum": "é" * (turn % 3)})}


def params(turn, **more):
    given = {"max_tokens": 8, "seed": turn, "temperature": 1.0, **ENDS[turn % 3], **more}
    return SamplingParams(**given)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("talk")
    write_tiny(path, tokenizer=True, max_position_embeddings=2048)
    Path(path, "chat_template.jinja").write_text(TEMPLATE)
    with Rollout(str(path), device="cpu", num_threads=1, num_kv_blocks=128) as rollout:
        yield rollout


@pytest.fixture(params=["embedded", "connected"])
def face(request, engine):
    if request.param == "embedded":
        yield engine
        return
    with Rollout.connect(engine.address, timeout=20) as client:
        yield client


@pytest.fixture
def seen(engine, monkeypatch):
    """The prompts that the engine's core was given, in order."""
    core, prompts = engine._async.backend.core, []

    def submit(requests, *args, real=core.submit, **kwargs):
        prompts.extend(list(request.prompt_token_ids) for request in requests)
        real(requests, *args, **kwargs)

    monkeypatch.setattr(core, "submit", submit)
    return prompts


def test_sixteen_tool_turns_continue_the_ids_that_the_engine_saw(face, engine, seen):
    session = face.session(tools=TOOLS)
    outputs = [session.chat([USER], params(0))]
    weights = None
    for turn in range(1, 17):
        if turn == 9:
            weights = write_weights(engine)
            engine.update_weights(weights)
        news = [result(turn)] if turn % 4 else [result(turn), result(turn + 100)]
        outputs.append(session.chat(news, params(turn)))
    got = session.trajectory()
    whole = got.prompt_token_ids.tolist() + got.token_ids.tolist()
    samples = [output.outputs[0] for output in outputs]

    assert seen == [output.prompt_token_ids for output in outputs]
    expected = list(seen[0])
    for turn, sample in enumerate(samples):
        assert seen[turn][: len(expected)] == expected  # every id, sampled ones included
        if turn:
            assert seen[turn] == expected + piece(engine, samples[turn - 1], turn)
        expected = seen[turn] + sample.token_ids
    assert whole == expected == session.token_ids

    mask = got.mask
    assert got.token_ids[mask].tolist() == [t for s in samples for t in s.token_ids]
    for field, values in (
        ("raw", got.raw_logprobs), ("processed", got.processed_logprobs),
        ("log_kept_mass", got.log_kept_mass),
    ):  # fmt: skip
        told = torch.tensor([p for s in samples for p in getattr(s.logprobs, field)])
        assert torch.equal(values[mask], told)
        assert not values[~mask].any()
    told = [v.version for s in samples for v in s.weight_versions for _ in range(v.start, v.stop)]
    assert got.weight_versions[mask].tolist() == told
    assert set(told) == {told[0], told[0] + 1}
    assert set(got.weight_versions[~mask].tolist()) == {-1}
    assert got.epoch == outputs[0].epoch
    assert got.finish_reasons == tuple(s.finish_reason for s in samples)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    assert any(isinstance(s.stop_reason, str) for s in samples)

    # What a client does that renders and tokenises the history anew gets other ids.
    anew = engine.tokenize(engine.render(session.messages, tools=TOOLS), add_special_tokens=False)
    assert anew[: len(whole)] != whole


def write_weights(engine):
    """Other weights of the same shapes."""
    with tempfile.TemporaryDirectory() as folder:
        return write_tiny(folder, seed=1, tokenizer=True, max_position_embeddings=2048)


def closing(turn):
    """The template's text after an answer, up to the next: written out by hand."""
    results = [result(turn)] if turn % 4 else [result(turn), result(turn + 100)]
    shown = "".join(f"<r>\n{m['content']}\n</r>" for m in results)
    return f"<|im_end|>\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"


def piece(engine, sample, turn):
    ids = engine.tokenize(closing(turn), add_special_tokens=False)
    return ids[1:] if sample.token_ids[-1] == END else ids


def test_the_logprobs_of_a_session_are_those_of_the_ids_it_holds(engine):
    session = engine.session()
    session.chat([USER], params(0))
    for turn in range(1, 4):
        session.chat([result(turn)], params(turn))
    got = session.trajectory()
    one = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = engine.generate([session.token_ids], one)
    rows = output.prompt_logprobs[len(got.prompt_token_ids) :]
    scored = torch.tensor([row[t] for row, t in zip(rows, got.token_ids.tolist(), strict=True)])
    assert torch.allclose(scored[got.mask], got.raw_logprobs[got.mask], atol=1e-4)


def test_raw_tokens_are_appended_as_they_are(face):
    session = face.session()
    first = session.generate([5, 6, 7], params(1))
    again = session.generate((), params(2))  # right where it ended
    third = session.generate("Hello", params(1))
    assert again.prompt_token_ids == [5, 6, 7, *first.outputs[0].token_ids]
    hello = face.tokenize("Hello", add_special_tokens=False)
    assert third.prompt_token_ids == [
        *again.prompt_token_ids, *again.outputs[0].token_ids, *hello
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="go on with generate"):
        session.chat([USER])


def test_a_turn_that_was_cut_short_says_so_in_the_trajectory(engine):
    long = {"max_tokens": 2000, "ignore_eos": True}

    def begin():
        session = engine.session()
        turn = threading.Thread(target=session.generate, args=([5, 6, 7], long))
        turn.start()
        eventually(lambda: engine.metrics().running or not turn.is_alive())
        return session, turn

    session, turn = standing_still(begin, engine, running=1)
    assert engine.abort() == 1
    turn.join(60)
    engine.resume_generation()
    assert session.trajectory().finish_reasons == ("abort",)
    session.generate((), params(1, ignore_eos=True))
    assert session.trajectory().finish_reasons == ("abort", "length")
    assert session.fork().trajectory().is_cut_short
    session.rewind(2)
    session.generate([5], params(1))
    assert not session.trajectory().is_cut_short


def test_a_fork_and_a_rewound_turn_leave_the_ids_before_them(engine):
    session = engine.session()
    session.chat([USER], params(1))
    before, said = session.token_ids, session.messages
    branches = [session.fork() for _ in range(2)]
    answers = [b.chat([result(1)], params(n)) for n, b in enumerate(branches)]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids
    assert session.token_ids == before
    branches[0].rewind()
    assert (branches[0].token_ids, branches[0].messages) == (before, said)
    branches[0].rewind()
    assert branches[0].token_ids == []
    assert branches[0].chat([USER], params(1)).outputs[0].token_ids == before[-5:]
    with pytest.raises(InvalidRequest, match="cannot forget 3 turns of 2"):
        branches[1].rewind(3)


@pytest.mark.parametrize(
    ("verb", "given", "words"),
    [
        *(("rewind", wrong, "turns must be an integer") for wrong in ("x", None, 1.0, [1])),
        *(("generate", wrong, "the prompt is neither") for wrong in (None, 5, b"ab", {5, 6})),
        ("generate", torch.tensor([5]), r"send its tolist\(\)"),
        ("generate", list(np.array([5])), r"int\(token\)"),
        ("chat", [{"content": "a"}], "message 0 must be a"),
        ("chat", [USER, {"role": "user", "content": 5}], "the content of message 1"),
    ],
)
def test_what_a_session_cannot_take_is_named_and_changes_nothing(engine, verb, given, words):
    session = engine.session()
    session.chat([USER], params(1))
    before, said = session.token_ids, session.messages
    with pytest.raises(InvalidRequest, match=words):
        getattr(session, verb)(given)
    assert (session.token_ids, session.messages) == (before, said)
    session.rewind(np.int64(1))
    assert session.token_ids == []


def test_ids_may_come_one_by_one(engine):
    session = engine.session()
    session.generate((token for token in (5, 6)), params(1))
    assert session.token_ids[:2] == [5, 6]


def test_what_a_session_is_compared_with_must_be_messages(engine):
    session = engine.session()
    session.chat([USER], params(1))
    for wrong, words in (("x", "a conversation is a list"), ([1], "message 0 must be a")):
        with pytest.raises(InvalidRequest, match=words):
            session.session.rewind_to(wrong)


def test_a_templates_variables_come_as_a_mapping(engine):
    for wrong in (True, "x", [1], 0):
        with pytest.raises(InvalidRequest, match="must map the template's variables"):
            engine.session(chat_template_kwargs=wrong)
        with pytest.raises(InvalidRequest, match="must map the template's variables"):
            engine.render([USER], chat_template_kwargs=wrong)


def test_a_turn_that_fails_leaves_the_session_as_it_was(face):
    session = face.session()
    session.chat([USER], params(1))
    before, said = session.token_ids, session.messages
    for wrong, error, words in (
        ([{"role": "assistant", "content": "mine"}], InvalidRequest, "only the engine answers"),
        ([], InvalidRequest, "one at least"),
        ("text", InvalidRequest, "must be a list"),
        ([{"role": "user", "content": "x" * 9000}], PromptTooLong, "max_model_len"),
    ):
        with pytest.raises(error, match=words):
            session.chat(wrong)
    with pytest.raises(InvalidRequest, match="fork"):
        session.chat([USER], {"n": 2, "temperature": 1.0})
    with pytest.raises(InvalidRequest, match="no variable named chat_template"):
        face.session(chat_template="{{ 1 }}").chat([USER])
    assert (session.token_ids, session.messages) == (before, said)
    session.chat([USER], params(2))


def test_a_template_that_hides_the_last_answer_is_refused(tmp_path):
    write_tiny(tmp_path, tokenizer=True)
    hides = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    Path(tmp_path, "chat_template.jinja").write_text(hides)
    with Rollout(str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=16) as rollout:
        session = rollout.session()
        session.chat([USER], params(1))
        with pytest.raises(InvalidRequest, match="does not show the last answer exactly once"):
            session.chat([USER])


def test_a_session_has_one_turn_at_a_time_and_forgets_one_that_was_left(engine):
    async def course():
        async with AsyncRollout.connect(engine.address, timeout=20) as rollout:
            session = rollout.session()
            long = params(1, max_tokens=2000, ignore_eos=True)
            async for _ in session.stream_chat([USER], long):
                with pytest.raises(InvalidRequest, match="one at a time"):
                    await session.chat([USER])
                break
            await asyncio.sleep(0)
            return session

    session = asyncio.run(course())
    assert session.token_ids == []


# ---- over HTTP ----


def http_course(engine, course):
    """``course(post, client)`` against the HTTP application over a client of ``engine``."""

    async def run():
        async with AsyncRollout.connect(engine.address, timeout=20) as rollout:
            transport = httpx.ASGITransport(app=build_app(rollout))
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:

                async def post(messages, turn, session="one", **headers):
                    body = {"messages": messages, "seed": turn, "return_token_ids": True}
                    body |= {"max_tokens": 6, "logprobs": True}
                    headers = {"X-Session-ID": session, **headers}
                    url = "/v1/chat/completions"
                    return await client.post(url, json=body, headers=headers)

                await course(post, client)

    asyncio.run(run())


def test_a_chat_client_that_names_its_session_gets_its_own_ids_continued(engine):
    async def course(post, client):
        messages, answers = [USER], []
        for turn in range(4):
            answer = (await post(messages, turn)).json()
            answers.append(answer)
            messages += [answer["choices"][0]["message"], result(turn)]
        held = (await client.get("/session", params={"session_id": "one"})).json()
        ids = held["prompt_token_ids"] + held["token_ids"]
        for before, after in itertools.pairwise(answers):
            known = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
            assert after["prompt_token_ids"][: len(known)] == known
        assert ids == answers[-1]["prompt_token_ids"] + answers[-1]["choices"][0]["token_ids"]
        assert sum(held["mask"]) == 4 * 6
        assert held["messages"] == messages[:-1]
        assert len(held["finish_reasons"]) == len(answers)
        others = {"prompt_token_ids", "messages", "finish_reasons"}
        lengths = {len(held[k]) for k in held.keys() - others if isinstance(held[k], list)}
        assert lengths == {len(held["token_ids"])}

        # Asked again (a retry), the last turn is another sample of the same prompt.
        again = (await post(messages[:-2], 9)).json()
        assert again["prompt_token_ids"] == answers[-1]["prompt_token_ids"]
        ended = await client.delete("/session", params={"session_id": "one"})
        assert ended.json() == {"session_id": "one", "ended": True}
        assert (await client.get("/session", params={"session_id": "one"})).status_code == 400

    http_course(engine, course)


def test_an_edited_history_is_refused_unless_it_is_asked_for(engine):
    async def course(post, client):
        answer = (await post([USER], 0)).json()["choices"][0]["message"]
        edited = [USER, {**answer, "content": "something else"}, result(1)]
        refused = await post(edited, 1)
        assert refused.status_code == 400
        assert "the history was edited" in refused.json()["error"]["message"]
        unknown = await post(edited, 1, session="two")
        assert "is not here" in unknown.json()["error"]["message"]
        held = (await client.get("/session", params={"session_id": "one"})).json()
        assert held["messages"] == [USER, answer]  # as it was
        anew = await post(edited, 1, **{"X-Session-Restart": "true"})
        text = engine.render(edited)
        expected = engine.tokenize(text, add_special_tokens=False)
        assert anew.json()["prompt_token_ids"] == expected
        wrong = await post(edited, 1, **{"X-Session-Restart": "perhaps"})
        assert "true or false" in wrong.json()["error"]["message"]

    http_course(engine, course)


def test_a_turn_over_http_that_fails_leaves_the_session_with_the_turns_before_it(engine):
    async def course(post, client):
        async def held():
            return (await client.get("/session", params={"session_id": "one"})).json()

        messages = [USER]
        for turn in range(2):
            messages += [(await post(messages, turn)).json()["choices"][0]["message"], result(turn)]
        before, too_long = await held(), {"role": "user", "content": "x" * 9000}
        restart = {"X-Session-Restart": "true"}
        for conversation, headers in (
            ([*messages[:2], too_long], {}),  # it would rewind a turn
            ([too_long], {}),
            ([too_long], restart),
            ([USER, {"role": "assistant", "content": "edited"}, too_long], restart),
        ):
            failed = await post(conversation, 3, **headers)
            assert failed.status_code == 400
            assert await held() == before
        went_on = (await post(messages, 4)).json()
        known = before["prompt_token_ids"] + before["token_ids"]
        assert went_on["prompt_token_ids"][: len(known)] == known
        assert (await held())["messages"][:-1] == messages

        failed = await post([too_long], 5, session="new")
        assert failed.status_code == 400
        gone = await client.get("/session", params={"session_id": "new"})
        assert "is here" in gone.json()["error"]["message"]

    http_course(engine, course)


def test_a_turn_that_is_left_keeps_the_named_session_and_one_that_begins_anew_goes_first(engine):
    async def course():
        async with AsyncRollout.connect(engine.address, timeout=20) as rollout:
            sessions = Sessions(rollout.session)

            def turn(conversation, many=1, **kwargs):
                some = params(1, max_tokens=many, ignore_eos=True)
                return sessions.stream_chat(
                    "one", conversation, some, request_id=uuid.uuid4().hex, stream=True, **kwargs
                )

            async def whole(outputs):
                async for _ in outputs:
                    pass

            await whole(turn([USER]))
            first = sessions.messages("one")
            await whole(turn([*first, result(1)]))
            both = sessions.messages("one")
            async with aclosing(turn([*first, result(2)], 2000)) as left:
                async for _ in left:
                    with pytest.raises(InvalidRequest, match="one at a time"):
                        await whole(turn([*both, result(2)]))
                    break
            assert sessions.messages("one") == both

            slow = turn([*both, result(3)], 200)
            await anext(slow)
            await whole(turn([USER], restart=True))
            anew = sessions.messages("one")
            await whole(slow)
            assert sessions.messages("one") == anew
            assert len(anew) == 2

            slow = turn([*anew, result(4)], 200)
            await anext(slow)
            assert sessions.end("one")
            await whole(slow)
            assert len(sessions) == 0

    asyncio.run(course())


def test_sessions_of_a_server_are_bounded_in_number_tokens_bytes_and_idle_time(engine):
    async def course():
        async with AsyncRollout.connect(engine.address, timeout=20) as rollout:

            async def turn(sessions, name, message=USER):
                outputs = sessions.stream_chat(
                    name, [message], params(1), request_id=f"{name}-turn", stream=False
                )
                async for _ in outputs:
                    pass

            few = Sessions(rollout.session, limit=2)
            for name in "abc":
                await turn(few, name)
            assert len(few) == 2
            with pytest.raises(InvalidRequest, match="'a' is here"):
                few.get("a")
            small = Sessions(rollout.session, max_tokens=few.get("b").num_tokens + 1)
            for name in "ab":
                await turn(small, name)
            assert len(small) == 1
            big = {"role": "user", "content": "Hi", "more": [{"x": "y" * 20_000}] * 2}
            tight = Sessions(rollout.session, max_bytes=50_000)
            for name, message in (("a", USER), ("b", USER), ("c", big)):
                await turn(tight, name, message)
            assert len(tight) == 3
            await turn(tight, "d", big)
            assert tight.get("d").held_bytes > 40_000
            assert len(tight) == 1
            short = Sessions(rollout.session, idle=0.05)
            await turn(short, "a")
            await asyncio.sleep(0.1)
            with pytest.raises(InvalidRequest, match=r"idle for 0\.05 s"):
                short.get("a")
            assert len(short) == 0
            with pytest.raises(InvalidRequest, match="characters"):
                await turn(short, "x" * 257)

    asyncio.run(course())
