"""Prediction heads against transformers' layers, and which of them are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_passes import check_close, run_head
from rank_threads import Session, prompts, run_ranks
from safetensors.torch import load_file
from tiny_heads import MTP, OracleHead, write_release
from tiny_models import write_tiny
from torch import Tensor

from rollout.distributed import TensorParallel
from rollout.engine.worker.held_component import HeldComponent
from rollout.engine.worker.kv_cache import KVShape
from rollout.errors import ConfigError
from rollout.models.adapters.slots import AdapterSlots
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.components import ComponentModels
from rollout.models.config.model import ModelConfig
from rollout.models.held_tensors import HeldTensors
from rollout.models.prediction.head import PredictionHead
from rollout.models.prediction.mtp_head import MTPHead, head_fault
from rollout.models.weight_io.table import check_tables
from rollout.weights import TensorMeta

CHUNKS = ([5, 2], [1, 0], [0, 1], [3, 3])
LENGTHS = (9, 6)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {"copies": True}),
    "deepseek_v3, tied": ("deepseek_v3", {"tied": True}),
    "glm4_moe": ("glm4_moe", {"copies": True, "vocab_size": 317, "use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite, dense": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5 with images": ("qwen3_5", {"images": True}),
    "qwen3_5_moe": ("qwen3_5_moe", {"tied": True}),
    "qwen3_5_moe with images": ("qwen3_5_moe", {"images": True}),
}


class Release:
    """A directory's tensors, its policy and head on each rank, and what transformers makes."""

    def __init__(self, path: Path, oracle: OracleHead, length: int = 40) -> None:
        self.config, self.length = ModelConfig.from_directory(path), length
        self.weights = load_file(path / "model.safetensors")
        self.held = HeldComponent.at("mtp", path, TensorParallel(), False)
        texts = [torch.tensor(ids) for ids in prompts(300, [n + 1 for n in LENGTHS])]
        self.following = [ids[1:].tolist() for ids in texts]
        self.before = [oracle.policy_states(ids[:-1]) for ids in texts]
        made = [oracle(ids[1:], h) for ids, h in zip(texts, self.before, strict=True)]
        self.states, self.logits = zip(*made, strict=True)

    def on(self, tp: TensorParallel, layout: str = "plain") -> tuple[CausalLM, PredictionHead]:
        """Loaded, each from all of the release's tensors."""
        policy = build_model(self.config, tp, torch.float32, "cpu", layout, max_model_len=40)
        head = self.held.build(policy.build, self.length)
        assert isinstance(policy, CausalLM)
        assert isinstance(head, PredictionHead)
        policy.load_weights(self.weights.items())
        head.load_weights(self.weights.items())
        return policy, head


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Release]:
    made: dict[str, Release] = {}

    class Made(dict[str, Release]):
        def __missing__(self, name: str) -> Release:
            path, (arch, settings) = tmp_path_factory.mktemp("release"), CASES[name]
            self[name] = Release(path, write_release(path, arch, **settings))
            return self[name]

    return Made(made)


def run(
    release: Release, policy: CausalLM, head: PredictionHead, steps: tuple[list[int], ...]
) -> tuple[list[Tensor], list[Tensor]]:
    return run_head(policy, head, release.following, release.before, steps)


@pytest.mark.parametrize("name", CASES)
def test_states_and_logits_are_those_of_transformers_layer(
    releases: dict[str, Release], name: str
) -> None:
    """In one pass and in chunks, on one rank and two, whatever the layout of linears."""
    release = releases[name]

    def work(tp: TensorParallel) -> list[tuple[list[Tensor], list[Tensor]]]:
        found = []
        for layout, steps in (("plain", CHUNKS), ("tiles", ([*LENGTHS],))):
            policy, head = release.on(tp, layout)
            before = tp.all_reduces
            found.append(run(release, policy, head, steps))
            assert tp.size == 1 or tp.all_reduces - before == 3 * len(steps)
        return found

    for size in (1, 2):
        for of_rank in run_ranks(size, work):
            for states, logits in of_rank:
                check_close(states, release.states)
                check_close(logits, release.logits)


@pytest.mark.parametrize("name", CASES)
def test_a_table_has_the_names_of_the_files(releases: dict[str, Release], name: str) -> None:
    """Which all ranks together take, each with a part or with whole experts."""
    release = releases[name]
    policy, head = release.on(TensorParallel())
    names = {meta.name for meta in release.held.tensors}
    assert names == {n for n in release.weights if n.startswith(release.config.further_prefixes)}
    copies = {n for n in names if n.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert bool(copies) == CASES[name][1].get("copies", False)
    fused = any("experts.down_proj" in n for n in names)
    assert names - copies == head.table.slots.keys() or fused
    report = head.load_weights((n, t) for n, t in release.weights.items() if n in names)
    assert report.loaded == head.table.slots.keys()
    for experts in {False, release.config.moe is not None}:
        build = replace(policy.build, expert_parallel=experts)
        ranks = [replace(build, tp=TensorParallel(rank, 2)) for rank in range(2)]
        check_tables([release.held.build(rank, 40).table for rank in ranks])


def test_only_the_rows_asked_for_are_given_and_go_on(releases: dict[str, Release]) -> None:
    """As what is before the token behind the next one."""
    for name in ("glm4_moe", "qwen3_next"):
        release = releases[name]
        policy, head = release.on(TensorParallel())
        session = Session(head, release.following)
        batch = replace(session.batch([5, 2]), logit_rows=torch.tensor([6, 2]))
        before = torch.cat([release.before[0][:5], release.before[1][:2]])
        found = head.hidden_states(policy, batch, session.kv, before)
        check_close([found], [torch.stack([release.states[1][1], release.states[0][2]])])
        check_close(
            [head.logits(policy, found)],
            [torch.stack([release.logits[1][1], release.logits[0][2]])],
        )


def test_another_instance_runs_with_weights_of_its_own(releases: dict[str, Release]) -> None:
    release = releases["qwen3_5"]
    policy, head = release.on(TensorParallel())
    fresh = head.empty_like()
    assert fresh.table.slots == head.table.slots
    assert fresh.rotary is head.rotary
    fresh.load_weights((n, t * 0) for n, t in release.weights.items())
    check_close(run(release, policy, head, ([*LENGTHS],))[0], release.states)
    fresh.load_weights(release.weights.items())
    check_close(run(release, policy, fresh, ([*LENGTHS],))[0], release.states)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"deterministic": True}])
def test_beside_a_quantised_or_deterministic_policy_it_is_neither(
    releases: dict[str, Release], settings: dict[str, Any]
) -> None:
    release = releases["glm4_moe"]
    policy = build_model(release.config, TensorParallel(), torch.float32, "cpu", **settings)
    assert isinstance(policy, CausalLM)
    policy.load_weights(release.weights.items())
    head = release.held.build(policy.build, 40)
    assert isinstance(head, PredictionHead)
    assert not head.table.quantized
    assert not head.build.deterministic
    head.load_weights(release.weights.items())
    check_close(run(release, policy, head, CHUNKS)[0], release.states)


def test_one_layer_of_pages_is_sized_for_it(releases: dict[str, Release]) -> None:
    for name in CASES:
        release = releases[name]
        head = release.on(TensorParallel())[1]
        shape = KVShape.of_draft(head.config, 2, 8, torch.float32)
        assert (shape.num_layers, shape.without, shape.indexed) == (1, (), ())
        assert shape.tensors == (1 if release.config.latent else 2)


@pytest.mark.parametrize("name", ["deepseek_v3, tied", "glm4_moe", "qwen3_5"])
def test_adapters_of_the_policy_have_no_part_in_it(releases: dict[str, Release], name: str) -> None:
    """Nor do they lose the rows that they have, of a step within which the head runs."""
    release = releases[name]
    policy, head = release.on(TensorParallel())
    slots = AdapterSlots(policy, 1, 4, vocabulary=True)
    slots.attach(policy)
    for each in slots.linears.values():
        each.scales.fill_(1.0)
        for factor in (each.a, each.b):
            factor.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    session = Session(policy, release.following)
    plain = session.batch([*LENGTHS])
    tokens = len(plain.input_ids)
    rows = torch.arange(tokens, dtype=torch.int32)
    tiles = torch.tensor([[0, 0, tokens]], dtype=torch.int32)
    batch = replace(plain, adapter_rows=rows, adapter_tiles=tiles)
    wanted = policy(batch, session.kv)
    assert not torch.allclose(wanted, policy(plain, session.kv), atol=0.1)
    states = policy.hidden_states(batch, session.kv)
    found = run(release, policy, head, CHUNKS)
    check_close([policy.logits(states)], [wanted])
    check_close(found[0], release.states)
    check_close(found[1], release.logits)


def test_layers_behind_the_first_are_passed_over(tmp_path: Path) -> None:
    for name, arch in (("a", "glm4_moe"), ("b", "qwen3_next")):
        oracle = write_release(tmp_path / name, arch)
        release = Release(tmp_path / name, oracle)
        config, first = release.config, release.held.tensors
        old, new = ("layers.2.", "layers.3.") if arch == "glm4_moe" else ("layers.0.", "layers.1.")
        further = {
            n.replace(old, new): t
            for n, t in release.weights.items()
            if n.startswith(config.further_prefixes) and old in n
        }
        if arch == "glm4_moe":
            config = replace(config, prefixes={**config.prefixes, "model.layers.3.": ""})
        both = (*first, *(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in further.items()))
        own = {prefix: prefix for prefix in config.further_prefixes}
        policy = release.on(TensorParallel())[0]
        head = MTPHead(
            replace(policy.build, config=config), 40, both, {**own, "model.": "", "lm_head.": ""}
        )
        head.load_weights({**release.weights, **further}.items())
        check_close(run(release, policy, head, ([*LENGTHS],))[0], release.states)


def test_a_component_is_the_running_head_only_where_it_drafts(
    releases: dict[str, Release],
) -> None:
    release = releases["glm4_moe"]
    policy, _ = release.on(TensorParallel())
    assert isinstance(release.held.build(policy.build), HeldTensors)
    assert release.held.longest("mtp", 10**6) == 10**6  # its positions are the policy's
    other = replace(policy.build, config=replace(release.config, hidden_size=32))
    with pytest.raises(ConfigError, match="hidden_size is 64, and the model's is 32"):
        release.held.build(other, 40)
    files = replace(release.held.head, tensors=release.held.tensors[1:])
    lacking = replace(release.held, head=files)
    name = release.held.tensors[0].name
    with pytest.raises(ConfigError, match=rf"draft_component='mtp' .* cannot run without {name}"):
        lacking.longest("mtp", 40)


def test_one_update_is_of_the_policy_and_its_head(releases: dict[str, Release]) -> None:
    """From all of the release's tensors; what is digested of a head is what came."""
    release = releases["qwen3_5_moe"]
    policy, head = release.on(TensorParallel())
    both = ComponentModels(policy.empty_like(), {"mtp": head.empty_like()})
    report = both.load_weights(release.weights.items())
    names = {f"mtp:{name}" for name in head.table.slots}
    assert report.loaded == names | policy.table.slots.keys()
    for name in names:
        (slot,) = both.table.slots[name]
        (own,) = head.table.slots[name.removeprefix("mtp:")]
        assert both.digest_slot(slot) == head.digest_slot(own)
    made, part = both.policy, both.component("mtp")
    assert isinstance(made, CausalLM)
    assert isinstance(part, PredictionHead)
    check_close(run(release, made, part, CHUNKS)[1], release.logits)


@pytest.mark.parametrize(
    ("arch", "settings", "told"),
    [
        ("deepseek_v32", {"num_nextn_predict_layers": 1}, "DeepseekV32.* attend by an index"),
        ("nemotron_h", {}, "NemotronH.* is of a kind that nothing here runs"),
        ("kimi_linear", {"num_nextn_predict_layers": 1}, "KimiLinear.* of a kind that nothing"),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, "Glm4Moe.* counts no layers that predict"),
        ("llama", {}, "Llama.* counts no layers that predict"),
        ("qwen3_next", {}, r"Qwen3Next.* without mtp\.fc\.weight, mtp\.layers\.0\.input_layernorm"),
    ],
)
def test_what_cannot_run_is_refused(
    tmp_path: Path, arch: str, settings: dict[str, Any], told: str
) -> None:
    write_tiny(tmp_path, arch, **settings)
    config = ModelConfig.from_directory(tmp_path)
    with pytest.raises(ConfigError, match=f"{told}.*; hold it without draft_component"):
        raise ConfigError(head_fault(config, ()))


def test_a_head_that_can_run_has_no_fault(releases: dict[str, Release]) -> None:
    for name in CASES:
        release = releases[name]
        metas = [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in release.weights.items()]
        assert head_fault(release.config, metas) == ""
        assert ("mtp." in release.config.further_prefixes) == (CASES[name][0] in MTP)
