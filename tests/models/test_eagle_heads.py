"""EAGLE-3 heads against transformers' Llama parts, what they read, and which are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_passes import check_close, run_head
from rank_threads import Session, prompts, run_ranks
from safetensors.torch import load_file, save_file
from tiny_eagles import SPECULATORS, OracleEagle, write_eagle
from tiny_models import write_tiny
from torch import Tensor
from transformers import LlamaConfig

from rollout.distributed import TensorParallel
from rollout.engine.worker.held_component import HeldComponent
from rollout.errors import ConfigError
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.components import ComponentModels
from rollout.models.config.model import ModelConfig
from rollout.models.forward import HiddenPages
from rollout.models.held_tensors import HeldTensors
from rollout.models.prediction.eagle_config import EagleConfig
from rollout.models.prediction.eagle_head import EagleHead
from rollout.models.weight_io.table import check_tables

CHUNKS = ([5, 2], [1, 0], [0, 1], [3, 3])
LENGTHS = (9, 6)
SOME = [*range(0, 60, 3), *range(61, 320, 2)]  # of the policy's 320 tokens

# The policy's kind, its layers, what is read of them, and what the head is like.
CASES: dict[str, tuple[str, int, list[int], dict[str, Any]]] = {
    "llama": ("llama", 8, [2, 4, 5], {"told": "", "targets": SOME}),
    "qwen3, speculators": (
        "qwen3", 4, [1, 2, 3],
        {
            "targets": SOME, "layer": SPECULATORS, "norms": ["norm_before_residual"],
            "embeds": True,
        },
    ),
    "llama, all norms, a window": (
        "llama", 4, [1, 2, 3],
        {
            "norms": ["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"],
            "layer": SPECULATORS,
            "settings": {"sliding_window": 4, "layer_types": ["sliding_attention"]},
        },
    ),
    "an embedding of its own, and another size": (
        "qwen2", 4, [1, 2, 4],
        {"embeds": True, "settings": {"hidden_size": 48}, "told": "eagle_config", "fc_bias": True},
    ),
    "the policy's head": ("llama", 4, [0, 1, 3], {"heads": False, "architecture": "X"}),
    "biases, under the policy's own name": (
        "llama", 4, [1, 2, 3],
        {
            "settings": {"attention_bias": True, "mlp_bias": True}, "targets": SOME,
            "architecture": "LlamaForCausalLM",
        },
    ),
    "a mixture, tied": ("qwen3_moe", 4, [1, 2, 3], {"targets": SOME}),
    "scaled embeddings": ("gemma2", 4, [1, 2, 3], {}),
    "recurrent states": ("qwen3_next", 3, [1, 2, 3], {}),
    "windows, in groups": ("gpt_oss", 4, [1, 2, 3], {"targets": SOME}),
}  # fmt: skip


class Trained:
    """A policy and its head: their files, and what transformers makes of two sequences."""

    def __init__(self, where: Path, oracle: OracleEagle) -> None:
        self.where, self.oracle = where, oracle
        self.config = ModelConfig.from_directory(where / "policy")
        self.held = HeldComponent.at("draft", where / "head", TensorParallel(), False)
        self.weights = load_file(where / "policy" / "model.safetensors")
        self.tensors = load_file(where / "head" / "model.safetensors")
        self.texts = [torch.tensor(ids) for ids in prompts(300, [n + 1 for n in LENGTHS])]
        self.following = [ids[1:].tolist() for ids in self.texts]
        self.read = [oracle.policy_states(ids[:-1]) for ids in self.texts]
        pairs = zip(self.texts, self.read, strict=True)
        made = [oracle(ids[1:], oracle.first(h)) for ids, h in pairs]
        self.states, self.logits = zip(*made, strict=True)

    def on(
        self, tp: TensorParallel, layout: str = "plain", dtype: torch.dtype = torch.float32
    ) -> tuple[CausalLM, EagleHead]:
        policy = build_model(self.config, tp, dtype, "cpu", layout, max_model_len=40)
        head = self.held.build(policy.build, 40)
        assert isinstance(policy, CausalLM)
        assert isinstance(head, EagleHead)
        policy.load_weights(self.weights.items())
        head.load_weights(self.tensors.items())
        return policy, head


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    class Made(dict[str, Trained]):
        def __missing__(self, name: str) -> Trained:
            where, (arch, layers, reads, head) = tmp_path_factory.mktemp("eagle"), CASES[name]
            tied = name.endswith("tied")
            more = {} if arch == "qwen3_next" else {"num_layers": layers}
            policy = write_tiny(where / "policy", arch, tied=tied, **more)
            self[name] = Trained(where, write_eagle(where / "head", policy, reads, **head))
            return self[name]

    return Made()


@pytest.mark.parametrize("name", CASES)
def test_states_and_logits_are_those_of_transformers_parts(
    trained: dict[str, Trained], name: str
) -> None:
    """In one pass and in chunks, on one rank and two, whatever the layout of linears."""
    one = trained[name]

    def work(tp: TensorParallel) -> list[tuple[list[Tensor], list[Tensor]]]:
        found = []
        for layout, steps in (("plain", CHUNKS), ("tiles", ([*LENGTHS],))):
            policy, head = one.on(tp, layout)
            before = tp.all_reduces
            found.append(run_head(policy, head, one.following, one.read, steps))
            assert tp.size == 1 or tp.all_reduces - before == 3 * len(steps)
        return found

    for size in (1, 2):
        for of_rank in run_ranks(size, work):
            for ours, theirs in of_rank:
                check_close(ours, one.states)
                check_close(theirs, one.logits)


@pytest.mark.parametrize("name", ["llama", "qwen3, speculators", "llama, all norms, a window"])
def test_later_drafts_are_of_its_own_states(trained: dict[str, Trained], name: str) -> None:
    one = trained[name]
    policy, head = one.on(TensorParallel())
    drafts, oracle = [7, 200, 31], one.oracle
    [ids], [read] = one.texts[:1], one.read[:1]
    session = Session(head, [[*one.following[0], *drafts]])
    last = head.hidden_states(policy, session.batch([LENGTHS[0]]), session.kv, head.first(read))
    last, before = last[-1:], oracle.first(read)
    for count in range(1, len(drafts) + 1):
        last = head.hidden_states(policy, session.batch([1]), session.kv, last)
        wanted, _ = oracle(torch.tensor([*ids[1:], *drafts[: count - 1]]), before)
        before = torch.cat((before, wanted[-1:]))
        states, logits = oracle(torch.tensor([*ids[1:], *drafts[:count]]), before)
        check_close([last, head.logits(policy, last)], [states[-1:], logits[-1:]])


def pages_for(policy: CausalLM, session: Session, reads: tuple[int, ...]) -> HiddenPages:
    rows, width = session.tables.numel() * 8 + 1, len(reads) * policy.config.hidden_size
    return HiddenPages(torch.full((rows, width), 7.0, dtype=policy.build.dtype), reads)


def read_pages(session: Session, pages: HiddenPages) -> list[Tensor]:
    found = []
    for table, length in zip(session.tables, LENGTHS, strict=True):
        at = torch.arange(length)
        found.append(pages.pages[table[at // 8].long() * 8 + at % 8])
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_policy_gives_what_its_layers_read(trained: dict[str, Trained], name: str) -> None:
    """Chunk by chunk, on one rank and two; its own states stay what they are."""
    one = trained[name]

    def work(tp: TensorParallel) -> list[Tensor]:
        policy, head = one.on(tp)
        assert head.reads == tuple(CASES[name][2])
        sequences = [ids[:-1].tolist() for ids in one.texts]
        session, plain = Session(policy, sequences), Session(policy, sequences)
        pages = pages_for(policy, session, head.reads)
        for counts in CHUNKS:
            batch = replace(session.batch(counts), hidden_pages=pages)
            wanted = policy(plain.batch(counts), plain.kv)
            assert torch.equal(policy(batch, session.kv), wanted)
        return read_pages(session, pages)

    for size in (1, 2):
        for of_rank in run_ranks(size, work):
            check_close(of_rank, one.read)


@pytest.mark.parametrize("reads", [(0, 2, 4), (1, 2, 3), (3, 3)])
def test_blocks_in_one_call_give_the_same_bits(tmp_path: Path, reads: tuple[int, ...]) -> None:
    source = write_tiny(tmp_path, "qwen3", num_layers=4, dtype=torch.bfloat16)
    config, bfloat16 = ModelConfig.from_directory(tmp_path), torch.bfloat16
    sequences = prompts(300, LENGTHS)

    def work(tp: TensorParallel) -> bool:
        policy = build_model(config, tp, bfloat16, "cpu", "tiles", max_model_len=40)
        assert isinstance(policy, CausalLM)
        policy.load_weights(source.state_dict().items())
        found: list[Tensor] = []
        for native in (True, False):
            if not native:
                policy.native_blocks = None
            session = Session(policy, sequences)
            pages = pages_for(policy, session, reads)
            for counts in CHUNKS:
                batch = replace(session.batch(counts), hidden_pages=pages)
                found.append(policy(batch, session.kv))
            found.append(pages.pages)
        half = len(found) // 2
        return all(map(torch.equal, found[:half], found[half:]))

    for size in (1, 2):
        assert all(run_ranks(size, work))


@pytest.mark.parametrize("name", CASES)
def test_a_table_has_the_names_of_the_files(trained: dict[str, Trained], name: str) -> None:
    one = trained[name]
    policy, head = one.on(TensorParallel())
    assert head.table.slots.keys() == one.tensors.keys() - {"d2t", "t2d"}
    ranks = [replace(policy.build, tp=TensorParallel(rank, 2)) for rank in range(2)]
    check_tables([one.held.build(rank, 40).table for rank in ranks])
    assert isinstance(one.held.build(policy.build), HeldTensors)
    assert one.held.longest("draft", 10**6) == 10**6  # its positions are the policy's


def test_one_update_is_of_the_policy_and_its_head(trained: dict[str, Trained]) -> None:
    """Also from a trainer that has the policy's embedding and the maps in its own."""
    one = trained["llama"]
    policy, head = one.on(TensorParallel())
    both = ComponentModels(policy.empty_like(), {"draft": head.empty_like()})
    sent = {"draft:embed_tokens.weight": torch.zeros(320, 64)}
    sent |= {f"draft:{name}": tensor for name, tensor in one.tensors.items()}
    both.load_weights({**one.weights, **sent}.items())
    assert both.constants.keys() == {"draft:d2t", "draft:t2d"}
    made, part = both.policy, both.component("draft")
    assert isinstance(made, CausalLM)
    assert isinstance(part, EagleHead)
    states, logits = run_head(made, part, one.following, one.read, CHUNKS)
    check_close(states, one.states)
    check_close(logits, one.logits)
    assert part.rotary is head.rotary


def changed(one: Trained, path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """The head's files with other fields, and other tensors; None: without it."""
    path.mkdir()
    values = json.loads((one.where / "head" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **config}))
    held = {n: t for n, t in {**one.tensors, **tensors}.items() if t is not None}
    save_file(held, path / "model.safetensors", {"format": "pt"})
    return path


def check_held_alone(one: Trained, head: Path, told: str) -> None:
    held = HeldComponent.at("draft", head, TensorParallel(), False)
    policy, _ = one.on(TensorParallel())
    assert isinstance(held.build(policy.build), HeldTensors)
    with pytest.raises(ConfigError, match=f"'draft' .*{told}"):
        held.longest("draft", 40)


@pytest.mark.parametrize(
    ("config", "tensors", "told"),
    [
        ({}, {"midlayer.hidden_norm.weight": None}, "without midlayer.hidden_norm is not EAGLE-3"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, and one layer runs"),
        ({"model_type": "qwen3"}, {}, "model_type is 'qwen3', and heads of a Llama layer run"),
        ({"speculators_model_type": "peagle"}, {}, "it is of another kind than EAGLE-3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "of another kind than EAGLE-3"),
        ({"num_attention_heads": None}, {}, "field 'num_attention_heads' is missing"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, {}, "must be a list of integers, got '2'"),
    ],
)  # fmt: skip
def test_a_kind_that_does_not_run_is_held_alone(
    trained: dict[str, Trained], tmp_path: Path, config: dict[str, Any], tensors: Any, told: str
) -> None:
    one = trained["llama"]
    head = changed(one, tmp_path / "head", config, tensors)
    check_held_alone(one, head, f"{told}.*hold it without draft_component")


def test_one_under_its_models_name_is_no_whole_model(
    trained: dict[str, Trained], tmp_path: Path
) -> None:
    """As heads of EAGLE 1 and 2 are, which have the model's vocabulary."""
    one = trained["llama"]
    tensors = {"midlayer.hidden_norm.weight": None}
    head = changed(one, tmp_path / "head", {"architectures": ["LlamaForCausalLM"]}, tensors)
    values = json.loads((head / "config.json").read_text())
    del values["draft_vocab_size"]
    (head / "config.json").write_text(json.dumps(values))
    check_held_alone(one, head, "is not EAGLE-3's")


@pytest.mark.parametrize(
    ("config", "tensors", "told"),
    [
        ({}, {"midlayer.mlp.up_proj.weight": None}, "run without midlayer.mlp.up_proj.weight"),
        ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(24)}, "has midlayer.self_attn.q_norm"),
        ({}, {"fc.weight": torch.ones(64, 96)}, r"joins states of 96 .*model's are 192"),
        ({}, {"d2t": None}, "a vocabulary of 150 tokens and no d2t.* of the model's 320"),
        ({}, {"d2t": torch.zeros(9, dtype=torch.int64)}, r"150 tokens, and d2t is \[9\]"),
        ({}, {"d2t": torch.full((150,), 200)}, "are not as many of the model's 320"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, {}, "before layers 2, 9, and .* has 8"),
        (
            {"hidden_size": 48}, {},
            "cannot run without embed_tokens.weight, which its files lack",
        ),
    ],
)  # fmt: skip
def test_what_is_not_of_the_policy_is_refused(
    trained: dict[str, Trained], tmp_path: Path, config: dict[str, Any], tensors: Any, told: str
) -> None:
    one = trained["llama"]
    held = HeldComponent.at(
        "draft", changed(one, tmp_path / "head", config, tensors), TensorParallel(), False
    )
    policy, _ = one.on(TensorParallel())
    assert held.longest("draft", 40) == 40
    with pytest.raises(ConfigError, match=f"the EAGLE head in {tmp_path}.*{told}"):
        held.build(policy.build, 40)


def test_a_config_that_says_what_differs_from_llama_alone_has_the_rest(tmp_path: Path) -> None:
    """As speculators writes it, whose heads add to what is behind the norm unless they say so."""
    layer = {"intermediate_size": 14336, "rope_theta": 5e5}
    read = EagleConfig.read({"transformer_layer_config": layer}, "config.json")
    assert (read.layer.hidden_size, read.layer.head_dim) == (4096, 128)
    assert (read.layer.num_kv_heads, read.layer.intermediate_size) == (32, 14336)
    assert (read.reads, read.norm_first) == ((), True)
    config = LlamaConfig(num_hidden_layers=1)
    whole = EagleConfig.read({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, "file")
    assert whole.layer.hidden_size == 4096
    assert not whole.norm_first
    assert whole.layer.layers[0].window == 0


def test_files_of_torch_are_read_too(trained: dict[str, Trained], tmp_path: Path) -> None:
    one = trained["llama"]
    (tmp_path / "config.json").write_text((one.where / "head" / "config.json").read_text())
    torch.save(one.tensors, tmp_path / "pytorch_model.bin")
    held = HeldComponent.at("draft", tmp_path, TensorParallel(), False)
    head = held.build(one.on(TensorParallel())[0].build, 40)
    assert isinstance(head, EagleHead)
    assert torch.equal(head.targets, torch.tensor(SOME))


def test_ranks_that_do_not_divide_a_head_are_told_of_it(trained: dict[str, Trained]) -> None:
    one = trained["llama"]
    build = replace(one.on(TensorParallel())[0].build, tp=TensorParallel(0, 3))
    with pytest.raises(ConfigError, match=r"the EAGLE head in .* ranks: .*heads \(4\) must be"):
        one.held.build(build, 40)
