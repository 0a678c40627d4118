"""Megatron-Core as a source: its layouts as boxes of the checkpoint, and its real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapted_models import adapted
from clients.install import folder
from frameworks.megatron_layouts import gpt_model, shard, tree, unstacked
from models.rank_threads import Session
from safetensors.torch import load_file
from tiny_heads import MTP, write_release
from tiny_models import write_tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_processes import Job
from transformers import AutoModelForCausalLM

from rollout import ConfigError, Rollout, WeightMismatch
from rollout.distributed import TensorParallel
from rollout.engine.worker.held_component import HeldComponent
from rollout.integrations.megatron import MegatronLayout, MegatronSource
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.weights.components import component_of, own_name

CLIENT = folder("megatron")
ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 128}
ALONE = {"tp": (0, 1), "pp": (0, 1), "ep": (0, 1)}
# As many layers for each stage, those of both kinds among them.
HYBRID = {"num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention"] * 2}
# (model, its own settings, tensor parallelism, of experts)
MODELS = (
    ("llama", {}, 2, 2),
    ("qwen2", {"tied": True}, 2, 2),
    ("qwen3", {}, 4, 4),  # two ranks for each query group
    ("qwen3_moe", {}, 2, 1),
    ("mixtral", {}, 2, 2),
    ("qwen2_moe", {}, 2, 1),
    ("glm4_moe", {"head": True, "first_k_dense_replace": 1}, 2, 1),
    ("deepseek_v3", {"head": True}, 2, 2),
    ("deepseek_v2", {"q_lora_rank": None}, 2, 1),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, 2, 1),
    ("qwen3_next", {"head": True, **HYBRID}, 2, 1),
    ("qwen3_5", {"head": True, **HYBRID}, 4, 4),  # two ranks for each query group, gates too
    ("qwen3_5_moe", {"head": True, "tied": True, **HYBRID}, 2, 2),
)


def checkpoint(
    path: Path, arch: str, head: bool = False, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    (write_release if head else write_tiny)(path, arch, **settings)
    weights = unstacked(load_file(path / "model.safetensors"))
    return json.loads((path / "config.json").read_text()), weights


@pytest.mark.parametrize("fused", [False, True], ids=["local", "transformer_engine"])
@pytest.mark.parametrize(("arch", "settings", "tp", "etp"), MODELS)
def test_the_boxes_of_all_ranks_are_the_checkpoint(
    tmp_path: Path, arch: str, settings: dict[str, Any], tp: int, etp: int, fused: bool
) -> None:
    config, weights = checkpoint(tmp_path, arch, **settings)
    filled = {name: torch.zeros_like(t) for name, t in weights.items()}
    times = {name: torch.zeros(t.shape, dtype=torch.int) for name, t in weights.items()}
    seen = set()
    for t, p, e, x in product(range(tp), range(2), range(2), range(etp)):
        places = {"tp": (t, tp), "pp": (p, 2), "ep": (e, 2), "etp": (x, etp)}
        held = shard(weights, config, **places, fused=fused, vocabulary=336)
        for part in MegatronLayout.of(config, places, alone=False).parts([gpt_model(held, config)]):
            name, behind = own_name(part.name), f"model.layers.{config['num_hidden_layers']}."
            assert name.startswith((behind, "mtp.")) == (component_of(part.name) == "mtp")
            assert part.shape == weights[name].shape
            assert part.values.shape == part.box.shape
            filled[name][part.box.slices] = part.values
            if (name, part.box) not in seen:
                times[name][part.box.slices] += 1
            seen.add((name, part.box))
    for name, tensor in weights.items():
        assert torch.equal(filled[name], tensor), name
        assert (times[name] == 1).all(), name


def test_virtual_chunks_take_turns(tmp_path: Path) -> None:
    config, weights = checkpoint(tmp_path, "llama", num_layers=4)
    for rank in range(2):
        chunks = [
            tree(shard(weights, config, tp=(0, 1), pp=(2 * turn + rank, 4), ep=(0, 1), etp=(0, 1),
                       fused=True, vocabulary=320))
            for turn in range(2)
        ]  # fmt: skip
        parts = MegatronLayout.of(config, {**ALONE, "pp": (rank, 2)}, alone=True).parts(chunks)
        assert all(torch.equal(part.values, weights[part.name][part.box.slices]) for part in parts)


def test_what_cannot_be_sent_is_refused_by_name(tmp_path: Path) -> None:
    config, weights = checkpoint(tmp_path, "qwen3")
    whole = shard(
        weights, config, **ALONE, etp=(0, 1), fused=True, vocabulary=336
    )  # fmt: skip
    source = MegatronSource(tree(whole), config=config)
    assert {name: tuple(t.shape) for name, t in source} == {
        name: tuple(t.shape) for name, t in weights.items()
    }
    odd = {**whole, "decoder.layers.1.mlp.extra": torch.ones(2), "mtp.weight": torch.ones(2)}
    with pytest.raises(WeightMismatch, match=r"what .*mtp\.weight.* of the Megatron") as refused:
        MegatronSource(tree(odd), config=config)
    assert set(refused.value.problems) == {"decoder.layers.1.mlp.extra", "mtp.weight"}
    with pytest.raises(WeightMismatch, match="linear_qkv of model"):
        MegatronSource(tree(whole), config=config, tp=(0, 2))
    with pytest.raises(WeightMismatch, match=r"model\.layers\.0.*tp, pp, ep and etp"):
        MegatronSource(tree(shard(
            weights, config, **{**ALONE, "tp": (1, 2)}, etp=(1, 2), fused=True, vocabulary=336
        )), config=config, tp=(1, 2))  # fmt: skip
    with pytest.raises(ConfigError, match="gpt2"):
        MegatronSource(tree(whole), config={**config, "model_type": "gpt2"})
    with pytest.raises(ConfigError, match="tp, pp, ep, etp: "):
        MegatronLayout.of(config, dict.fromkeys(("tp", "pp", "ep", "etp")), alone=False)
    for field in ("rotary_interleaved", "moe_mlp_glu_interleave_size"):
        module = tree(whole)
        module.config = SimpleNamespace(**{field: 32})
        with pytest.raises(ConfigError, match=f"Megatron's {field}"):
            MegatronSource(module, config=config)
    module = tree(whole)
    module.share_embeddings_and_output_weights = True
    with pytest.raises(ConfigError, match="tie_word_embeddings=False"):
        MegatronSource(module, config=config)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("transport", ["inline", "ipc", "broadcast", "p2p"])
def test_a_model_with_its_head_goes_beside_components_and_adapters(
    heads: dict[str, Any], transport: str
) -> None:
    """Of one rank, whose shard is the whole model: read where it lies, or gathered."""
    engine, (old, new) = heads["engine"], heads["weights"]
    draft = {name: tensor + 0.125 for name, tensor in heads["draft"].items()}
    before = {"policy": old, "mtp": old, "draft": heads["draft"]}
    engine.update_weights(before)
    sent = {"draft": draft, "policy": heads["source"]()}
    receipt = engine.update_weights(
        sent, adapters={"math": heads["adapter"]}, transport=transport, timeout=20.0
    )
    assert set(receipt.components) == {"policy", "mtp", "draft"}
    assert set(receipt.adapters) == {"math"}
    want = {"policy": new, "mtp": new, "draft": draft}
    assert engine.check_weights(want).equal
    assert engine.check_weights({"draft": draft, "policy": heads["source"]()}).equal
    assert engine.preflight({"draft": draft, "policy": heads["source"]()}).problems == ()
    assert not engine.check_weights(before).equal
    receipt = engine.update_weights(
        heads["source"](), adapters={"math": heads["adapter"]}, transport=transport, timeout=20.0
    )
    assert set(receipt.components) == {"policy", "mtp"}
    assert engine.check_weights(want).equal


def test_a_component_that_comes_twice_is_refused_by_name(heads: dict[str, Any]) -> None:
    engine, (old, _) = heads["engine"], heads["weights"]
    version = engine.weight_version
    for sent, match in (
        ({"mtp": old, "policy": heads["source"]()}, "'mtp' comes twice, with 'mtp' and with 'pol"),
        ({"draft": heads["source"]()}, "'draft' is a source of policy, mtp: pass it as the 'pol"),
    ):
        with pytest.raises(ConfigError, match=match):
            engine.update_weights(sent)
    receipt = engine.update_weights({"mtp": old, "policy": heads["source"](mtp=False)})
    assert set(receipt.components) == {"policy", "mtp"}
    assert engine.weight_version == version + 1


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An engine with a head, a draft and an adapter's slot, and what a trainer sends to it."""
    where = tmp_path_factory.mktemp("heads")
    _, old = checkpoint(where / "a", "glm4_moe", head=True, first_k_dense_replace=1)
    config, new = checkpoint(where / "b", "glm4_moe", head=True, seed=1, first_k_dense_replace=1)
    _, draft = checkpoint(where / "draft", "llama", num_layers=1)
    held = shard(new, config, **ALONE, etp=(0, 1), fused=True, vocabulary=336)
    components = {"draft": str(where / "draft"), "mtp": str(where / "a")}
    settings = {"components": components, "max_adapters": 2, "dtype": "float32"}
    with Rollout(str(where / "a"), tensor_parallel_size=2, **ENGINE, **settings) as engine:
        yield {
            "engine": engine,
            "weights": (old, new),
            "draft": draft,
            "adapter": adapted(where / "b", 8, target_modules=["q_proj"]),
            "source": lambda **told: MegatronSource(tree(held), config=config, **told),
        }


def test_what_fsdp_has_spread_is_refused_by_name(tmp_path: Path) -> None:
    """A mesh of one, whose only rank has every row: of more ranks each would claim them all."""
    config, weights = checkpoint(tmp_path, "qwen3")
    whole = shard(weights, config, **ALONE, etp=(0, 1), fused=True, vocabulary=336)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole[name] = distribute_tensor(whole[name], mesh, [Shard(0)])
        with pytest.raises(WeightMismatch, match=r"layers\.1.*linear_fc2\.weight of .*DTensors"):
            MegatronSource(tree(whole), config=config, **ALONE)
    finally:
        dist.destroy_process_group()


def test_parameters_that_come_with_the_next_forward_are_refused(tmp_path: Path) -> None:
    """As Megatron's DDP has them under ``overlap_param_gather``: one rank's shard alone is new."""
    config, weights = checkpoint(tmp_path, "qwen3")
    model, wrapped = nn.Module(), nn.Module()
    model.module = tree(shard(weights, config, **ALONE, etp=(0, 1), fused=True, vocabulary=336))
    wrapped.module = model
    handle = model.register_forward_pre_hook(lambda *_: None)
    wrapped.remove_forward_pre_hook_handles = {model: handle}
    with pytest.raises(ConfigError, match=r"overlap_param_gather.*disable_forward_pre_hook\(\)"):
        MegatronSource(wrapped, config=config)
    wrapped.remove_forward_pre_hook_handles.pop(model).remove()
    assert dict(MegatronSource(wrapped, config=config)).keys() == weights.keys()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    log = tmp_path_factory.mktemp("megatron") / "log"
    started = Job(Path(__file__).parent / "megatron_job.py", 4, log, str(CLIENT))
    try:
        assert None not in started.answers(180), log.read_text()
        yield started
    finally:
        started.close()


@pytest.mark.more
@pytest.mark.skipif(CLIENT is None, reason="Megatron-Core is not installed: make clients")
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("qwen3_moe", {}),
        ("qwen3", {"tied": True}),
        ("glm4_moe", {"head": True}),
        ("deepseek_v3", {"head": True}),
        ("qwen3_next", {"head": True, **HYBRID}),
        ("qwen3_5", {"head": True, **HYBRID}),
        ("qwen3_5_moe", {"head": True, **HYBRID}),
    ],
)
def test_an_update_from_megatrons_own_model_equals_a_fresh_start(
    job: Job, tmp_path: Path, arch: str, settings: dict[str, Any]
) -> None:
    """Tensor, pipeline and expert parallelism of two each, over four ranks; with the head that
    drafts.
    """
    checkpoint(tmp_path / "a", arch, **settings)
    _, held = checkpoint(tmp_path / "b", arch, **settings, seed=1)
    drafts = {"draft_component": "mtp", "num_speculative_tokens": 2} if "head" in settings else {}
    weights = {"policy": held, **({"mtp": held} if drafts else {})}
    prompts, params = [[5, 6, 7], [8, 9]], {"max_tokens": 8, "temperature": 0, "logprobs": 0}
    with Rollout(str(tmp_path / "b"), **ENGINE, **drafts) as cold:
        wanted = [o.outputs[0] for o in cold.generate(prompts, params)]
    for prompt, one in zip(prompts, wanted, strict=True):
        theirs = logprobs(tmp_path / "b", prompt, list(one.token_ids))
        assert torch.allclose(torch.tensor(one.logprobs.raw), theirs, atol=2e-4)
    with Rollout(str(tmp_path / "a"), **ENGINE, **drafts) as engine:
        ask = {"op": "update", "path": str(tmp_path / "b"), "address": engine.address}
        odd = job.ask(**ask, transport="p2p", odd_rank=3)
        assert None not in odd, job.log.read_text()[-4000:]
        assert {a["error"] for a in odd if a} == {"WeightMismatch"}, odd
        assert all("decoder.layers.0.mlp.extra" in a["message"] for a in odd if a)
        assert engine.weight_version == 0
        for transport in ("p2p", "broadcast"):
            engine.update_weights({name: str(tmp_path / "a") for name in weights})
            assert not engine.check_weights(weights).equal
            answers = job.ask(**ask, transport=transport)
            assert None not in answers, job.log.read_text()
            assert all("version" in a for a in answers if a), answers
            assert engine.check_weights(weights).equal
            got = [o.outputs[0] for o in engine.generate(prompts, params)]
            assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
            assert [o.logprobs.raw for o in got] == [o.logprobs.raw for o in wanted]


@pytest.mark.more
@pytest.mark.skipif(CLIENT is None, reason="Megatron-Core is not installed: make clients")
@pytest.mark.parametrize(
    "arch",
    [
        *("qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3"),
        *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    ],
)
def test_megatrons_own_forward_gives_the_logits_of_what_is_sent(
    job: Job, tmp_path: Path, arch: str
) -> None:
    """The order of rows in its fused tensors is that of its forward over the same four ranks."""
    groups = {"n_group": 1, "topk_group": 1}  # which the two score otherwise
    hybrid, grouped = arch in MTP, arch in ("glm4_moe", "deepseek_v3")
    write_tiny(tmp_path, arch, **(groups if grouped else HYBRID if hybrid else {}))
    ids = [5, 6, 7, 8, 9, 200, 11, 300]
    answers = job.ask(op="forward", path=str(tmp_path), ids=ids)
    assert answers == [{}] * 4, job.log.read_text()[-4000:]
    theirs = load_file(tmp_path / "logits")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0]
        states = model.model(torch.tensor([ids])).last_hidden_state[0, :-1]
    assert theirs["next"].std() > 0.5
    assert (theirs["next"] - ours).abs().max() < 1e-4
    if grouped or hybrid:
        further = of_the_head(tmp_path, ids[1:], states)
        assert further.std() > 0.5
        assert (theirs["further"][:-1] - further).abs().max() < 1e-4


def logprobs(path: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of ``tokens`` behind ``prompt``, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return rows.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def of_the_head(path: Path, following: list[int], before: torch.Tensor) -> torch.Tensor:
    """The logits of a release's head, by ours."""
    weights, alone = load_file(path / "model.safetensors"), TensorParallel()
    policy = build_model(ModelConfig.from_directory(path), alone, torch.float32, "cpu")
    head = HeldComponent.at("mtp", path, alone, False).build(policy.build, 40)
    for one in (policy, head):
        one.load_weights(weights.items())
    session = Session(head, [following])
    states = head.hidden_states(policy, session.batch([len(following)]), session.kv, before)
    return head.logits(policy, states)
