"""Every element of every parameter is written once, and every element of a checkpoint is taken."""

import time
from dataclasses import replace

import pytest
import torch
from tiny_models import write_tiny

from rollout.errors import WeightMismatch
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import WeightTable, check_table, check_tables, tiling_fault
from rollout.weights import Box

SHAPE = {"vocab_size": 317, "num_attention_heads": 8, "num_key_value_heads": 2}
FIRST = "model.layers.0"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "llama", attention_bias=True, mlp_bias=True, **SHAPE)
    return ModelConfig.from_directory(path)


def edited(table: WeightTable, source: str, edit) -> WeightTable:
    """``table`` with the slots of one source passed through ``edit``."""
    slots = dict(table.slots)
    slots[source] = tuple(edit(list(slots[source])))
    return replace(table, slots=slots)


def down_one_row(box: Box) -> Box:
    return box.shifted((1, *(0,) * (len(box.starts) - 1)))


EDITS = {
    "deleted": lambda slots: slots[1:],
    "doubled": lambda slots: [*slots, slots[0]],
    "put one row lower": lambda slots: [
        replace(slots[0], put=down_one_row(slots[0].put)),
        *slots[1:],
    ],
    "taken one row lower": lambda slots: [
        replace(slots[0], take=down_one_row(slots[0].take)),
        *slots[1:],
    ],
}
SOURCES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    f"{FIRST}.self_attn.q_proj.weight",
    f"{FIRST}.self_attn.k_proj.bias",
    f"{FIRST}.self_attn.o_proj.weight",
    f"{FIRST}.mlp.up_proj.weight",
    f"{FIRST}.mlp.down_proj.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("layout", ["plain", "tiles"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_tables_of_all_ranks_are_whole(config, size, layout):
    tables = build_tables(config, size, torch.float32, layout)
    check_tables(tables)
    assert all(set(t.slots) == set(tables[0].slots) for t in tables)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_slot_deleted_doubled_or_shifted_by_one_row_is_refused(config, source, edit, size):
    tables = build_tables(config, size)
    for rank in range(size):
        broken = list(tables)
        broken[rank] = edited(tables[rank], source, EDITS[edit])
        with pytest.raises(WeightMismatch, match="weight"):
            check_tables(broken)


def test_a_fault_that_one_rank_can_see_names_the_parameter(config):
    table = edited(build_tables(config, 1)[0], f"{FIRST}.mlp.up_proj.weight", EDITS["deleted"])
    with pytest.raises(WeightMismatch, match=r"gate_up_proj.weight: 8192 of 16384 elements"):
        check_table(table)


def test_ranks_that_take_different_boxes_of_a_replica_are_refused(config):
    tables = build_tables(config, 4)
    source = f"{FIRST}.self_attn.k_proj.weight"
    rows = tables[0].slots[source][0].take
    assert rows == tables[1].slots[source][0].take != tables[2].slots[source][0].take

    def half_a_head_further(slots):
        by = (rows.shape[0] // 2, 0)
        return [replace(slots[0], take=slots[0].take.shifted(by))]

    with pytest.raises(WeightMismatch, match="overlap"):
        check_tables([tables[0], edited(tables[1], source, half_a_head_further), *tables[2:]])


def test_a_rank_that_knows_other_sources_is_refused(config):
    tables = build_tables(config, 2)
    fewer = replace(
        tables[1], slots={k: v for k, v in tables[1].slots.items() if k != "lm_head.weight"}
    )
    with pytest.raises(WeightMismatch, match=r"other sources than rank 0: \['lm_head.weight'\]"):
        check_tables([tables[0], fewer])


def test_a_vocabulary_smaller_than_the_ranks_leaves_some_with_padding_alone(tmp_path):
    write_tiny(tmp_path, "qwen3", vocab_size=5)
    tables = build_tables(ModelConfig.from_directory(tmp_path), 4)
    check_tables(tables)
    assert tables[3].slots["lm_head.weight"][0].take.numel == 0
    assert tables[3].params["lm_head.weight"].padding == (Box((0, 0), (2, 64)),)


def test_checking_eight_ranks_of_a_deep_model_takes_less_than_a_second(tmp_path):
    write_tiny(tmp_path, "qwen3", num_attention_heads=8, num_key_value_heads=8)
    config = ModelConfig.from_directory(tmp_path)
    config = replace(config, num_layers=28, layers=config.layers[:1] * 28)
    tables = build_tables(config, 8)
    assert len(tables[0].slots) > 300
    started = time.process_time()
    check_tables(tables)
    assert time.process_time() - started < 1.0


def test_tiling_faults_say_what_is_wrong():
    def box(*pairs):
        return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    halves = [box((0, 2), (0, 3)), box((2, 4), (0, 3))]
    assert tiling_fault(halves, (4, 3)) is None
    assert "3 of 12 elements" in tiling_fault([halves[0], box((2, 3), (0, 3))], (4, 3))
    assert "overlap" in tiling_fault([*halves, box((1, 2), (1, 2))], (4, 3))
    assert "outside" in tiling_fault([box((0, 5), (0, 3))], (4, 3))
    # Right in number, wrong in place.
    assert "overlap" in tiling_fault([halves[0], halves[0]], (4, 3))
    assert tiling_fault([Box((), ())], ()) is None
    assert "overlap" in tiling_fault([Box((), ()), Box((), ())], ())
