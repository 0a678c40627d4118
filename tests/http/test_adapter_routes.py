"""Adapters by vLLM's routes, beside the weights: loaded, named as models, unloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from server_settings import CONTROL
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams

STEM = "base_model.model.model.layers.0.self_attn.q_proj"
PROMPT = list(range(3, 30))


def write(into: Path) -> str:
    torch.manual_seed(3)
    factors = {"A": torch.randn(2, 64), "B": torch.randn(64, 2)}
    into.mkdir()
    save_file(
        {f"{STEM}.lora_{name}.weight": factor for name, factor in factors.items()},
        into / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (into / "adapter_config.json").write_text(json.dumps(config))
    return str(into)


def test_an_adapter_is_a_model_by_its_name_or_behind_the_base(http, served, adapter_dir) -> None:
    def post(path: str, **body: object) -> tuple[int, str]:
        answer = http.post(path, json=body)
        return answer.status_code, answer.text

    def completion(model: str) -> str:
        asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json={"model": model, **asked})
        assert (answer.status_code, answer.json()["model"]) == (200, model)
        return str(answer.json()["choices"][0]["text"])

    def scores(**body: object) -> list[float]:
        asked = {"prompts": [PROMPT], **body}
        answer = http.post("/v1/score", json=asked)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"][0]["logprobs"])

    base = completion("tiny")
    path = write(adapter_dir / "one")
    assert post("/v1/load_lora_adapter", lora_name="one", lora_path=path)[0] == 200
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "one"]
    for name in ("one", "tiny:one"):
        card = http.get(f"/v1/models/{name}").json()
        assert (card["id"], card["parent"]) == ("one", "tiny")
    assert completion("one") == completion("tiny:one") != base
    assert completion("tiny") == base
    assert scores(model="one") == scores(adapter="one") == scores(model="tiny:one") != scores()
    vectors = [
        http.post("/v1/embeddings", json={"input": PROMPT, **named}).json()["data"][0]["embedding"]
        for named in ({"model": "one"}, {"adapter": "one"}, {})
    ]
    assert vectors[0] == vectors[1] != vectors[2]
    status, text = post("/v1/completions", model="one", adapter="two", prompt=[3])
    assert (status, "names the adapter 'one', and adapter 'two'" in text) == (400, True)
    status, text = post("/v1/completions", model="two", prompt=[3])
    assert (status, "tiny, one" in text) == (404, True)
    status, text = post("/v1/completions", model="tiny", prompt=[3], adapter="two")
    assert (status, "no adapter 'two'; loaded: one" in text) == (400, True)
    status, text = post("/v1/load_lora_adapter", lora_name="tiny", lora_path=path)
    assert (status, "the base model's name" in text) == (400, True)
    greedy = SamplingParams(adapter="one", temperature=0, max_tokens=8, ignore_eos=True)
    with Rollout.connect(served.grpc, token=CONTROL) as rollout:
        [output] = rollout.generate([PROMPT], greedy)
        assert output.outputs[0].text == completion("one")
        tokens = output.outputs[0].token_ids
        [scored] = rollout.score([PROMPT], [tokens], adapter="one")
        assert scored.logprobs.tolist() == pytest.approx(output.outputs[0].logprobs.raw, abs=1e-4)
    asked: dict[str, Any] = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    }
    asked["sampling_params"]["ignore_eos"] = True
    texts = [post("/generate", lora_path=name, **asked)[1] for name in (None, "one")]
    assert [json.loads(text)["text"] for text in texts] == [base, completion("one")]
    vectors = [post("/v1/embeddings", model=name, input=[PROMPT]) for name in ("tiny", "one")]
    assert vectors[0][0] == vectors[1][0] == 200
    assert json.loads(vectors[0][1])["data"] != json.loads(vectors[1][1])["data"]
    assert post("/v1/unload_lora_adapter", lora_name="one")[0] == 200
    assert post("/v1/completions", model="one", prompt=[3])[0] == 404


def test_prime_rl_asks_again_while_a_shared_file_system_does_not_show_its_adapter(
    http: httpx.Client, adapter_dir: Path
) -> None:
    """Its ``_is_retryable_lora_error``: upon 404 and 500, and upon no other status."""

    def load(path: Path) -> int:
        body = {"lora_name": "late", "lora_path": str(path)}
        return http.post("/load_lora_adapter", json=body).status_code

    late, wrong = adapter_dir / "step_1", adapter_dir / "step_2"
    assert load(late) == 404
    write(wrong)
    weights = wrong / "adapter_model.safetensors"
    weights.rename(adapter_dir / "later")
    assert load(wrong) == 404
    (adapter_dir / "later").rename(weights)
    (wrong / "adapter_config.json").write_text("{}")
    assert load(wrong) == 400
    assert load(adapter_dir.parent) == 400  # outside of what may be read nothing is told
    write(late)
    assert load(late) == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200


def test_skyrl_loads_what_its_trainer_wrote_into_the_same_directory(
    http: httpx.Client, adapter_dir: Path
) -> None:
    """Also where the files look as before, as on a shared file system that is behind."""
    body = {"lora_name": "skyrl-lora", "lora_path": write(adapter_dir / "sync")}
    told = [http.post("/skyrl/v1/load_lora_adapter", json=body) for _ in range(2)]
    assert [reply.status_code for reply in told] == [200, 200], told[0].text
    assert told[1].json()["version"] == told[0].json()["version"] + 1
    asked = {"model": "skyrl-lora", "token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    [choice] = http.post("/inference/v1/generate", json=asked).json()["choices"]
    assert choice["adapter"] == f"skyrl-lora@{told[1].json()['version']}"
    name = {"lora_name": "skyrl-lora"}
    assert http.post("/v1/unload_lora_adapter", json=name).status_code == 200


def test_adapters_that_the_server_is_started_with_are_served_by_their_names(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    modules = [f"{name}={write(tmp_path / name)}" for name in ("one", "two")]
    flags = ["--served-model-name", "tiny", "--max-adapters", "2", "--lora-modules", *modules]
    body = {"model": "two", "prompt": PROMPT, "max_tokens": 4}
    with serve(tmp_path / "tiny", *flags) as served:
        cards = httpx.get(f"http://{served.http}/v1/models", timeout=30).json()["data"]
        answer = httpx.post(f"http://{served.http}/v1/completions", json=body, timeout=30).json()
    assert [card["id"] for card in cards] == ["tiny", "one", "two"]
    assert answer["choices"][0]["adapter"].startswith("two@")
