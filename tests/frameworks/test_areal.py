"""AReaL's client of an SGLang server, as it is on PyPI, against ``rollout serve``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapted_models import adapted
from clients.install import folder
from frameworks.jobs import run
from safetensors.torch import save_file
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout

CLIENT = folder("areal")
PROMPT = [5, 6, 7, 8]
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks transformers so
@pytest.mark.skipif(CLIENT is None, reason="AReaL is not installed: make clients")
def test_areals_own_client_samples_scores_and_updates(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "qwen3")
    write_tiny(tmp_path / "weights" / "disk", "qwen3", seed=1)
    sent = dict(write_tiny(tmp_path / "other", "qwen3", seed=2).named_parameters())
    save_file({name: p.detach() for name, p in sent.items()}, tmp_path / "sent.safetensors")
    adapters = tmp_path / "weights" / "adapters"
    models = [adapted(tmp_path / "tiny", seed=n) for n in (1, 2)]
    for number, model in enumerate(models, 1):
        model.save_pretrained(adapters / str(number))
    flags = ["--dtype", "float32", "--weight-dir", str(tmp_path / "weights")]
    flags += ["--max-num-batched-tokens", "64", "--max-adapters", "2"]
    with serve(tmp_path / "tiny", *flags) as served, Rollout.connect(served.grpc) as rollout:
        before = rollout.generate(PROMPT, {**GREEDY, "prompt_logprobs": 0})[0]
        files = (tmp_path / "weights" / "disk", tmp_path / "sent.safetensors", tmp_path, adapters)
        got = run("areal_job.py", served.http, *files, over=CLIENT)[-1]
        assert rollout.check_weights(sent).equal
        after = rollout.generate(PROMPT, GREEDY)[0].outputs[0]
        assert set(rollout.weight_info().adapters) == {"policy-v2"}
    first = before.outputs[0]
    assert got["generate"]["tokens"] == first.token_ids
    assert got["generate"]["logprobs"] == pytest.approx(first.logprobs.raw, abs=1e-5)
    assert got["generate"]["stop"] == "length"
    wanted = [before.prompt_logprobs[i][t] for i, t in ((2, 7), (3, 8))]
    assert got["score"] == pytest.approx([0, 0, *wanted], abs=1e-5)
    assert len(got["interrupted"]["tokens"]) == 400
    assert got["disk"] == 1
    assert got["refused"].startswith("RuntimeError: Failed after 2 retries")
    assert got["group"] == 2
    assert got["after"]["tokens"] == after.token_ids
    for found, model in zip(got["adapters"], models, strict=True):
        # The adapter over what was broadcast, as PEFT computes it.
        model.load_state_dict({_within(name): p for name, p in sent.items()}, strict=False)
        ids = torch.tensor([PROMPT + found["tokens"]])
        with torch.no_grad():
            wanted = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        assert found["tokens"] == wanted.argmax(-1).tolist()
        assert found["logprobs"] == pytest.approx(wanted.max(-1).values.tolist(), abs=1e-4)


def _within(name: str) -> str:
    """A parameter's name in a PEFT model of these adapters."""
    module, _, kind = name.rpartition(".")
    base = ".base_layer" if module.endswith(("q_proj", "v_proj", "down_proj")) else ""
    return f"base_model.model.{module}{base}.{kind}"
