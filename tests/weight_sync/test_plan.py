"""Plans of boxes: every wanted element once, from a rank that has it, in bounded rounds."""

from __future__ import annotations

import json
import time
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from engine_ranks import Engine
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_models import write_tiny
from trainer_ranks import TrainerRanks, rows, whole

from rollout.cli.main import main
from rollout.cli.plan import plan_traffic
from rollout.errors import ConfigError
from rollout.weight_sync.trainer.reshard_plan import gap, plan_rounds
from rollout.weights import Box, TensorMeta
from rollout.weights.box import cut, disjoint, interval_boxes

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
@settings(deadline=None, max_examples=200)
def test_an_interval_is_few_boxes(shape, data) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = interval_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    flat = torch.arange(numel).reshape(shape)
    found = [flat[box.slices].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat([*found, flat.new_empty(0)]), torch.arange(start, stop))


def boxes_in(shape):
    pairs = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*pairs).map(lambda p: Box(tuple(a for a, _ in p), tuple(b for _, b in p)))


@given(st.lists(boxes_in((4, 5, 3)), max_size=6), st.integers(1, 12))
@settings(deadline=None, max_examples=200)
def test_boxes_are_made_disjoint_and_cut(boxes, most) -> None:
    count, wanted = torch.zeros(4, 5, 3, dtype=torch.int64), torch.zeros(4, 5, 3)
    for box in boxes:
        wanted[box.slices] = 1
    for box in disjoint(boxes):
        for part in cut(box, most):
            assert 0 < part.numel <= most
            count[part.slices] += 1
    assert torch.equal(count, wanted.long())


META = [
    TensorMeta("a", torch.bfloat16, (37, 40)),
    TensorMeta("b", torch.float32, (64,)),
    TensorMeta("c", torch.bfloat16, ()),
    TensorMeta("d", torch.bfloat16, (8, 6, 5)),
]


def columns(shape, rank, size):
    return rows(shape[::-1], rank, size) and [
        Box(box.starts[::-1], box.stops[::-1]) for box in rows(shape[::-1], rank, size)
    ]


def partitions(shape, rank, size):
    """What ZeRO-3 leaves on a rank: an equal run of the flattened tensor."""
    step = -(-prod(shape) // size)
    return interval_boxes(tuple(shape), rank * step, min((rank + 1) * step, prod(shape)))


def layouts(place, size):
    return [
        {m.name: tuple((place if m.shape else whole)(m.shape, r, size)) for m in META}
        for r in range(size)
    ]


@pytest.mark.parametrize("bucket", [256, 4096, 1 << 20])
@pytest.mark.parametrize("takes", [rows, columns, whole], ids=["rows", "columns", "whole"])
@pytest.mark.parametrize("gives", [(rows, 1), (rows, 3), (columns, 4), (whole, 2)])
def test_every_element_arrives_once_within_bounds(gives, takes, bucket) -> None:
    have, want = layouts(*gives), layouts(takes, 3)
    assert gap(META, have) is None
    rounds = plan_rounds(META, have, want, bucket)
    got = [{m.name: torch.zeros(m.shape, dtype=torch.int64) for m in META} for _ in want]
    for index, header in enumerate(rounds):
        assert header.index == index
        sent, taken = Counter(), Counter()
        for message in header.messages:
            sent[message.src] += message.nbytes
            taken[message.dst] += message.nbytes
            for entry in message.entries:
                assert any(
                    held.intersect(entry.box) == entry.box for held in have[message.src][entry.name]
                )
                got[message.dst][entry.name][entry.box.slices] += 1
        assert max(sent.values()) <= bucket
        assert max(taken.values()) <= bucket
        for rank in range(3):
            share = header.share(rank)
            assert share.nbytes <= bucket
            assert all(entry.offset + entry.nbytes <= share.nbytes for entry in share.entries)
    for rank, layout in enumerate(want):
        for meta in META:
            wanted = torch.zeros(meta.shape, dtype=torch.int64)
            for box in layout[meta.name]:
                wanted[box.slices] = 1
            assert torch.equal(got[rank][meta.name], wanted)


def test_what_is_not_there_or_there_in_part_twice_is_named() -> None:
    have = [dict(layout) for layout in layouts(rows, 2)]
    have[1]["a"] = ()
    assert gap(META, have) == "no trainer rank holds all or a known box of a"
    have[1]["a"] = (Box((10, 0), (37, 40)),)
    assert gap(META, have) == "the trainer ranks' boxes of a overlap"


@pytest.mark.parametrize(
    ("trainer", "size", "place"),
    [("fsdp:2", 2, rows), ("fsdp:3", 3, rows), ("zero3:3", 3, partitions), ("ddp:2", 2, whole)],
    ids=["fsdp2", "fsdp3", "zero3", "ddp2"],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_planned_bytes_are_what_moves(checkpoints, tmp_path, trainer, size, place, tp) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    write_tiny(tmp_path, "qwen3", tied=True, seed=0, **heads)
    traffic = plan_traffic(
        str(tmp_path), trainer=trainer, rollout=f"tp:{tp}x3", bucket_bytes=32 << 10
    )
    engine = Engine(checkpoints[0], tp, checkpoints[1], "plain")
    moved: Counter[tuple[int, int]] = Counter()
    call = engine.call

    def counting(method, args, tensors=None):
        if method == "stage_bucket":
            for message in json.loads(args["header"])["messages"]:
                sizes = (entry["nbytes"] for entry in message["entries"])
                moved[message["src"], message["dst"]] += sum(sizes)
        return call(method, args, tensors)

    engine.call = counting
    try:
        receipt = TrainerRanks(engine, size, place).send(checkpoints[2], bucket_bytes=32 << 10)[0]
    finally:
        engine.close()
    assert {(src, dst): n for src, dst, n in traffic.links} == dict(moved)
    assert traffic.total_bytes == 3 * sum(moved.values())
    assert sum(moved.values()) <= receipt.wire_bytes <= 1.01 * sum(moved.values())
    assert traffic.weight_bytes == receipt.num_bytes


KIMI = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 163840, "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 5e4,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "num_experts": 384,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [0], "dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


def test_a_trillion_parameters_are_planned_from_their_config(tmp_path, capsys) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(KIMI))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    started, before = time.monotonic(), resident("VmRSS")
    command = ["plan", "--trainer", "fsdp:1024", "--rollout", "tp:8x32", "--model", str(config)]
    assert main([*command, "--bandwidth", "50", "--json"]) == 0
    assert time.monotonic() - started < 60
    assert resident("VmHWM") - before < 4e9
    said = json.loads(capsys.readouterr().out)
    assert 1.02e12 < said["weight_bytes"] / 2 < 1.03e12
    # Norms and routers go to every rank of an engine, all else to one.
    assert 32 * said["weight_bytes"] <= said["total_bytes"] <= 1.01 * 32 * said["weight_bytes"]
    sent, taken = Counter[int](), Counter[int]()
    for src, dst, nbytes in said["links"]:  # of one engine
        sent[src] += 32 * nbytes
        taken[dst] += nbytes
    assert len(sent) == 1024
    assert len(taken) == 8
    assert max(taken.values()) == pytest.approx(said["weight_bytes"] / 8, rel=0.01)
    assert max(sent.values()) == said["busiest_sender"][1]
    slowest = max(*sent.values(), *taken.values())
    assert said["seconds"]["50"] == pytest.approx(slowest / 50e9, rel=1e-6)


def resident(what: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at their peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


@pytest.mark.parametrize("arch", ["qwen3_next", "nemotron_h"])
def test_layers_of_every_kind_are_planned(tmp_path, arch) -> None:
    write_tiny(tmp_path, arch)
    traffic = plan_traffic(str(tmp_path), trainer="fsdp:2", rollout="tp:2")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert traffic.tensors == len(names)
        assert traffic.weight_bytes == sum(file.get_tensor(name).nbytes for name in names)


@pytest.mark.parametrize(
    "arguments", [("fsdp:0", "tp:1"), ("zero:2", "tp:1"), ("fsdp:2", "pp:2"), ("hsdp:2", "tp:1")]
)
def test_what_makes_no_sense_is_named(tmp_path, arguments) -> None:
    with pytest.raises(ConfigError, match=r"--trainer|--rollout"):
        plan_traffic(str(tmp_path), trainer=arguments[0], rollout=arguments[1])


def test_the_bytes_of_a_fleet_are_planned(tmp_path, capsys) -> None:
    write_tiny(tmp_path)
    capsys.readouterr()  # what writing has said
    command = ["plan", "--trainer", "fsdp:4", "--rollout", "tp:2x8", "--model", str(tmp_path)]
    assert main([*command, "--hosts", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    single = plan_traffic(str(tmp_path), trainer="fsdp:4", rollout="tp:2x8")
    once = single.weight_bytes
    assert plan["front_sends"] == plan["host_receives"] == plan["host_sends"] == once
    assert (plan["hops"], plan["ways"]["member 2"]) == (4, "member 0")
    assert plan["ways"]["member 3"] == "maps member 2"
    assert plan["host_memory_bytes"] == 2 * once
    assert once / 2 <= plan["member_memory_bytes"] == single.busiest_receiver[1] < once
    assert main([*command, "--hosts", "4", "--front", "among"]) == 0
    assert "3 from the front to the last member" in capsys.readouterr().out
    assert main([*command, "--hosts", "2", "--gpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["hops"], plan["front_sends"], plan["host_memory_bytes"]) == (8, once, 8 * once)
    for wrong in (["--hosts", "9"], ["--gpu"], ["--front", "among"]):
        assert main([*command, *wrong]) == 2
        assert "--hosts" in capsys.readouterr().err
