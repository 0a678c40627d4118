"""Models that run as transformers' own modules, behind the public face."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import transformers_sweep
from rank_threads import Session
from tiny_models import randomize
from transformers import ArceeConfig, ArceeForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.errors import ConfigError, WeightMismatch
from rollout.models.config.model import ModelConfig
from rollout.models.transformers_backend.construct import unfilled
from rollout.models.transformers_backend.passes import Together, passes
from rollout.models.transformers_lm import TransformersCausalLM
from rollout.server.preflight import check

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "num_kv_blocks": 32,
    "skip_tokenizer_init": True, "block_size": 4,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(3, 22)), [7, 8, 9]]


def write(path: Path, seed: int, window: int = 6) -> Any:
    """Starcoder2: norms and linears with biases, no gate, a window, a tied head."""
    torch.manual_seed(seed)
    model = Starcoder2ForCausalLM(Starcoder2Config(**SIZES, sliding_window=window)).eval()
    randomize(model)
    model.save_pretrained(path)
    return model


def outcome(engine: Rollout) -> list[tuple[list[int], list[float]]]:
    found = [output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)]
    return [(list(one.token_ids), list(one.logprobs.raw)) for one in found]


def test_an_engine_of_transformers_modules_generates_as_transformers_does_and_is_updated(
    tmp_path: Path,
) -> None:
    first, second = (write(tmp_path / name, seed) for seed, name in enumerate("ab"))
    with Rollout(str(tmp_path / "b"), **ENGINE) as fresh:
        wanted = outcome(fresh)
    with Rollout(str(tmp_path / "a"), **ENGINE) as engine:
        for model, source in ((first, None), (second, second)):
            if source is not None:
                assert engine.update_weights(source, timeout=20).version == 1
            for prompt, (tokens, logprobs) in zip(PROMPTS, outcome(engine), strict=True):
                ids = torch.tensor([[*prompt, *tokens]])
                with torch.no_grad():
                    logits = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                assert tokens == logits.argmax(-1).tolist()
                theirs = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert torch.allclose(torch.tensor(logprobs), theirs, atol=1e-4)
                with torch.no_grad():
                    state = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
                [found] = engine.embed(prompt, normalize=False)
                assert torch.allclose(torch.tensor(found.embedding), state, atol=1e-4)
        assert outcome(engine) == wanted
        assert engine.check_weights(second).equal
        state = second.state_dict()
        del state["model.layers.0.mlp.c_fc.bias"]
        with pytest.raises(WeightMismatch, match=r"c_fc\.bias"):
            engine.update_weights(state, timeout=10)
        assert outcome(engine) == wanted


ZAMBA: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2,
    "mamba_d_state": 12, "n_mamba_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        pytest.param("ZambaForCausalLM", SIZES | ZAMBA, id="states beside attention"),
        pytest.param("MambaForCausalLM", SIZES, marks=pytest.mark.more, id="states alone"),
        pytest.param("BloomForCausalLM", SIZES, marks=pytest.mark.more, id="attention by itself"),
    ],
)
def test_modules_that_attend_by_themselves_are_given_their_pages_and_states(
    tmp_path: Path, architecture: str, config: dict[str, Any]
) -> None:
    """In chunks, from found prefixes, and after preemption."""
    models = []
    kind = getattr(transformers, architecture)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        models.append(kind(kind.config_class(**config)).eval())
        randomize(models[-1])
        models[-1].save_pretrained(tmp_path / name)
    prompts = [list(range(3 + i, 20 + 5 * i)) for i in range(3)]
    few = {**ENGINE, "num_kv_blocks": 18, "max_num_batched_tokens": 16, "max_num_seqs": 12}
    with Rollout(str(tmp_path / "a"), **few, max_model_len=64, state_snapshot_blocks=1) as engine:
        for model in models:
            if model is models[1]:
                engine.update_weights(model, timeout=20)
            for cached in (False, True):
                outputs = engine.generate(prompts, GREEDY)
                assert cached == any(output.num_cached_tokens for output in outputs)
                for prompt, output in zip(prompts, outputs, strict=True):
                    tokens = output.outputs[0].token_ids
                    with torch.no_grad():
                        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
                    rows = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                    assert list(tokens) == rows.argmax(-1).tolist()
                    theirs = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                    raw = torch.tensor(output.outputs[0].logprobs.raw)
                    assert torch.allclose(raw, theirs, atol=1e-4)
        assert engine.check_weights(models[1]).equal


def test_sequences_that_decode_run_in_one_pass_whatever_their_lengths(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = transformers.BloomForCausalLM
    theirs = kind(kind.config_class(**SIZES)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    model = transformers_sweep.load(ModelConfig.from_directory(tmp_path), tmp_path)
    assert isinstance(model, TransformersCausalLM)
    passed: list[tuple[int, ...]] = []
    model.inner.register_forward_pre_hook(
        lambda module, args, kwargs: passed.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    sequences = [list(range(3, 16)), [7, 8, 9, 10, 11], list(range(40, 53))]
    session = Session(model, sequences)
    found = [session.advance(counts) for counts in ([9, 3, 9], [2, 0, 2], [1, 1, 1], [1, 1, 1])]
    assert passed == [(2, 9), (1, 3), (2, 2), (3, 1), (3, 1)]
    for ids, parts in zip(sequences, zip(*found, strict=True), strict=True):
        with torch.no_grad():
            wanted = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert torch.allclose(torch.cat(parts).log_softmax(-1), wanted, atol=1e-4)


def test_a_pass_is_not_mostly_padding_and_has_room() -> None:
    contexts = [1000, 900, 10, 300, 700]

    def groups(counts: list[int], **how: Any) -> list[tuple[int, ...]]:
        starts = torch.tensor([0, *counts]).cumsum(0)
        tokens = int(starts[-1])
        step: Any = SimpleNamespace(
            query_starts=starts, context_lens=torch.tensor(contexts), input_ids=torch.arange(tokens)
        )
        how = {"together": Together.PADDED, "paged": True, "token_wise": False, **how}
        found = list(passes(step, **how))
        assert sorted(torch.cat([one.tokens.flatten() for one in found]).tolist()) == [
            *range(tokens)
        ]
        return [one.sequences for one in found]

    assert groups([1] * 5) == [(0, 1, 4), (3, 2)]
    assert groups([1] * 5, paged=False) == [(4, 3, 2, 1, 0)]
    assert groups([1] * 5, together=Together.ONE) == [(0,), (1,), (2,), (3,), (4,)]
    assert groups([1, 1, 10, 1, 700]) == [(0, 1), (3,), (2,), (4,)]
    contexts = [700] * 5
    assert groups([700] * 5) == [(4, 3), (2, 1), (0,)]
    assert groups([1] * 5, together=Together.EQUAL) == [(4, 3, 2, 1, 0)]
    assert groups([2] * 5, token_wise=True) == [(4, 3, 2, 1, 0)] * 2


@pytest.mark.parametrize(("model_type", "head_dim"), [("bailing_hybrid", 16), ("longcat_flash", 8)])
def test_names_of_memory_that_no_name_of_the_files_shows_are_told_to_the_sender(
    tmp_path: Path, model_type: str, head_dim: int
) -> None:
    """Convolutions of several tensors of the files in one, and experts of unequal number."""
    architecture = dict(transformers_sweep.model_types())[model_type]
    sizes = {"num_key_value_heads": 4, "head_dim": head_dim}
    first, second = (
        transformers_sweep.write(architecture, tmp_path / name, seed, sizes)
        for seed, name in enumerate("ab")
    )
    with Rollout(str(tmp_path / "b"), **ENGINE) as fresh:
        wanted = outcome(fresh)
    with Rollout(str(tmp_path / "a"), **ENGINE) as engine:
        files = {meta.name for meta in engine.weight_info().tensors}
        assert {name for name, _ in second.named_parameters()} - files  # are there any?
        with pytest.raises(WeightMismatch, match="unknown"):
            engine.update_weights({**first.state_dict(), "pigeons": torch.zeros(3)}, timeout=20)
        assert engine.update_weights(second, timeout=20).version == 1
        assert outcome(engine) == wanted
        assert engine.check_weights(second).equal
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.view(-1)[::7] += 0.25
        receipt = engine.update_weights(second, encoding="delta", timeout=20)
        assert receipt.version == 2
        assert engine.check_weights(second).equal
        assert outcome(engine) != wanted


def test_modules_that_keep_a_state_themselves_are_refused(tmp_path: Path) -> None:
    kind = transformers.RecurrentGemmaForCausalLM
    kind(kind.config_class(**SIZES | {"num_hidden_layers": 3})).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is not served: over pages its logprobs differ"):
        Rollout(str(tmp_path), **ENGINE)


def test_experts_whose_tokens_are_counted_first_are_served(tmp_path: Path) -> None:
    """JetMoe's split a step's tokens by counts, which modules without memory do not have."""
    kind = transformers.JetMoeForCausalLM
    config = kind.config_class(**SIZES | {"kv_channels": 16, "num_local_experts": 4})
    torch.manual_seed(0)
    model = kind(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    with Rollout(str(tmp_path), **ENGINE) as engine:
        found = outcome(engine)
        assert engine.check_weights(model).equal
    for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), theirs, atol=1e-4)


def test_the_check_before_a_start_says_by_whom_a_model_is_served_or_why_not(tmp_path: Path) -> None:
    ArceeForCausalLM(ArceeConfig(**SIZES)).save_pretrained(tmp_path)
    served = check(EngineConfig(model=str(tmp_path), **ENGINE)).served
    assert "by transformers" in served
    assert served.endswith("on 1, 2 or 4 ranks (8: 4 heads of queries do not divide over them), "
                           "cut by transformers' plan")  # fmt: skip
    with pytest.raises(ConfigError, match="without deterministic"):
        check(EngineConfig(model=str(tmp_path), **ENGINE, deterministic=True))
    values = json.loads((tmp_path / "config.json").read_text())
    rope = {
        "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }  # fmt: skip
    for change, why in (
        (
            {"architectures": ["OpenAIGPTLMHeadModel"], "model_type": "openai-gpt"},
            "neither through the interface nor through a cache",
        ),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "states beside the KV"),
        ({"architectures": ["NobodysForCausalLM"]}, "has no such model"),
        ({"rope_parameters": {**rope, "rope_type": "dynamic"}}, "'dynamic' depends on"),
        ({"rope_parameters": {**rope, "rope_type": "longrope"}}, "'longrope' depends on"),
    ):
        with pytest.raises(ConfigError, match=f"Nor by transformers.*{why}"):
            ModelConfig.from_hf(values | change)


def test_a_model_whose_attention_is_not_what_it_seems_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that hides from the interface how far it sees."""
    write(tmp_path, 0, window=2)
    from transformers.models.starcoder2 import modeling_starcoder2 as theirs

    honest = theirs.Starcoder2Attention.forward

    def silent(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept, self.config.sliding_window = self.config.sliding_window, None
        try:
            return honest(self, *args, **kwargs)
        finally:
            self.config.sliding_window = kept

    monkeypatch.setattr(theirs.Starcoder2Attention, "forward", silent)
    with pytest.raises(ConfigError, match="is not served: over pages its logprobs differ"):
        Rollout(str(tmp_path), **ENGINE)


def test_modules_that_threads_make_at_a_time_leave_torchs_initialisers_as_they_were():
    initialiser = torch.nn.init.normal_
    others_turn, ended = threading.Event(), threading.Event()

    def first():
        with unfilled(torch.device("meta")):
            others_turn.wait(0.5)  # which never comes: the other one is not within yet
        ended.set()

    def second():
        with unfilled(torch.device("meta")):
            others_turn.set()
            ended.wait()

    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(first)
        while torch.nn.init.normal_ is initialiser and not begun.done():
            time.sleep(0.001)
        pool.submit(second).result(60)
    assert torch.nn.init.normal_ is initialiser
