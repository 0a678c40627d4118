"""Images over HTTP: OpenAI's real client, and the two routes by which TRL pairs them with ids."""

from __future__ import annotations

import base64
from io import BytesIO

import httpx
import openai
import pytest
from PIL import Image
from tiny_vision import END, PAD, START, check_greedy, frames, picture, write_vision

from rollout import Rollout, SamplingParams
from rollout.server.http.app import build_app

PARTS = 12  # of a picture


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    model = write_vision(path, tokenizer=True)
    settings = {"device": "cpu", "dtype": "float32", "served_model_name": "tiny", "max_images": 2}
    with Rollout(path, **settings) as engine:
        yield engine, model


@pytest.fixture
async def http(served):
    transport = httpx.ASGITransport(build_app(served[0]._async), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def uri(image):
    out = BytesIO()
    image.save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def asked(*images, text="What is it?"):
    parts = [{"type": "image_url", "image_url": {"url": uri(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


async def test_openais_client_sends_an_image_whole_and_streamed(served, http):
    engine, model = served
    image = picture(1)
    asking = {"model": "tiny", "messages": asked(image), "max_tokens": 5, "temperature": 0}
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=http, max_retries=0
    ) as client:
        answer = await client.chat.completions.create(
            **asking, extra_body={"return_token_ids": True}
        )
        stream = await client.chat.completions.create(**asking, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content
        assert answer.usage.prompt_tokens == len(engine.tokenize(asking["messages"]))
        [output] = engine.chat(asking["messages"], SamplingParams(max_tokens=5, temperature=0))
        check_greedy(model, output, [image])
        assert answer.choices[0].token_ids == output.outputs[0].token_ids
        with pytest.raises(openai.BadRequestError, match="3 images, but max_images is 2"):
            await client.chat.completions.create(**{**asking, "messages": asked(*[image] * 3)})
        remote = {"type": "image_url", "image_url": {"url": "https://example.invalid/a.png"}}
        with pytest.raises(openai.BadRequestError, match=r"content\[0\] is a remote URL"):
            await client.chat.completions.create(
                **{**asking, "messages": [{"role": "user", "content": [remote]}]}
            )


async def test_a_response_sees_the_images_of_messages_and_of_tools(served, http):
    engine, model = served
    images = [picture(4), picture(5, 40, 17)]
    shown = [{"type": "input_image", "image_url": uri(one), "detail": "auto"} for one in images]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}, shown[0]]},
        {"type": "function_call_output", "call_id": "a", "output": [shown[1]]},
    ]
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=http, max_retries=0
    ) as client:
        answer = await client.responses.create(
            model="tiny", input=items, temperature=0, max_output_tokens=5
        )
    first, second = asked(images[0], text="")[0]["content"], asked(images[1], text="")[0]["content"]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, first[0]]},
        {"role": "tool", "content": second[:1]},
    ]
    [output] = engine.chat(messages, SamplingParams(max_tokens=5, temperature=0))
    check_greedy(model, output, images)
    assert answer.output_text == output.outputs[0].text
    assert answer.usage.input_tokens == len(output.prompt_token_ids)


async def test_images_are_rendered_once_and_paired_with_tokens_afterwards(served, http):
    _, model = served
    image = picture(2)
    body = {"model": "tiny", "messages": asked(image, text=""), "max_tokens": 1}
    rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
    features = rendered["features"]
    [place] = features["mm_placeholders"]["image"]
    assert rendered["token_ids"][place["offset"]] == PAD
    assert place["length"] == PARTS
    ids = [5, 6, START, *[PAD] * PARTS, END, 9]
    asking = {"max_tokens": 5, "temperature": 0, "logprobs": 0}
    body = {"token_ids": ids, "features": features, "sampling_params": asking}
    reply = await http.post("/inference/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    direct = served[0].generate(
        [ids], SamplingParams(max_tokens=5, temperature=0), images=[[image]]
    )
    check_greedy(model, direct[0], [image])
    assert choice["token_ids"] == direct[0].outputs[0].token_ids
    reply = await http.post("/inference/v1/generate", json={"token_ids": ids})
    assert reply.status_code == 400
    assert "without images" in reply.json()["error"]["message"]
    figures = (await http.get("/metrics")).text
    assert 'rollout_encoder_cache_queries_total{model_name="tiny"}' in figures


async def test_openais_client_sends_a_video_as_frames(served, http):
    engine, model = served
    video = frames(1)
    url = "data:video/jpeg;base64," + ",".join(
        uri(Image.fromarray(one)).partition(",")[2] for one in video
    )
    part = {"type": "video_url", "video_url": {"url": url}, "fps": 2.0}
    content = [part, *asked(picture(1))[0]["content"]]
    asking = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=http, max_retries=0
    ) as client:

        async def sent(content):
            messages = [{"role": "user", "content": content}]
            return await client.chat.completions.create(
                messages=messages, extra_body={"return_token_ids": True}, **asking
            )

        answer = await sent(content)
        messages = [{"role": "user", "content": content}]
        [output] = engine.chat(messages, SamplingParams(max_tokens=5, temperature=0))
        check_greedy(model, output, [picture(1)], [(video, 2.0)])
        assert answer.choices[0].token_ids == output.outputs[0].token_ids
        with pytest.raises(openai.BadRequestError, match=r"content\[0\] needs the frames per sec"):
            await sent([{**part, "fps": None}])
        remote = {"url": "https://example.invalid/a.mp4"}
        with pytest.raises(openai.BadRequestError, match=r"content\[0\] is a remote URL"):
            await sent([{**part, "video_url": remote}])
        with pytest.raises(
            openai.BadRequestError, match=r"is no video that can be decoded|needs PyAV"
        ):
            await sent([{**part, "video_url": {"url": "data:video/mp4;base64,AAAA"}}])
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        reply = await http.post("/v1/chat/completions/render", json=body)
        assert reply.status_code == 400
        assert "videos are not handed out" in reply.json()["error"]["message"]
