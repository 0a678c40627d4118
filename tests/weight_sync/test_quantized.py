"""Quantised weights under a trainer that has floats: made on arrival, the same at any split."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from engine_ranks import Engine, same
from models.rank_threads import Session
from safetensors.torch import load_file
from tiny_models import write_tiny
from trainer import DEADLINE, Trainer, nudged
from trainer_ranks import DeltaTrainerRanks, TrainerRanks, rows

from rollout.distributed import TensorParallel
from rollout.errors import ChecksumMismatch, ConfigError, TransferFailed, WeightMismatch
from rollout.kernels import quantize
from rollout.models.build import build_model, build_tables
from rollout.models.config.model import ModelConfig
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.protocol.bucket import check_header
from rollout.weight_sync.protocol.cells import decode_cells, encode_cells
from rollout.weight_sync.protocol.digests import combine, slot_rows, total
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weights import Box, CellPatch, TensorPiece
from rollout.weights.box import interval_boxes
from rollout.weights.cells import CellGrid
from rollout.weights.quantization import SCHEMES

HIDDEN = 160  # no multiple of a block
SIZES = {"int8": (1, 2, 4), "fp8": (1, 2, 4), "fp8_block": (1, 2), "mxfp4": (1, 2, 4)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Blocks of 128 fit a half of every dimension that two ranks split, and cut off others."""
    where, found = tmp_path_factory.mktemp("models"), []
    shape = {
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": HIDDEN,
        "intermediate_size": 256, "num_hidden_layers": 1,
    }  # fmt: skip
    for seed in (0, 1):
        model = write_tiny(where / str(seed), "qwen3", tied=True, seed=seed, **shape)
        found.append({n: t.clone() for n, t in model.state_dict().items() if n[:7] != "lm_head"})
    return ModelConfig.from_directory(where / "0"), *found


def ranks_of(checkpoints, scheme: str, size: int, weights=None):
    """Every rank's model with the weights, in the layout that this CPU's kernels read."""
    models = [
        build_model(
            checkpoints[0], TensorParallel(rank, size), torch.bfloat16, "cpu", "auto",
            quantization=scheme,
        )
        for rank in range(size)
    ]  # fmt: skip
    for model in models:
        model.load_weights((weights or checkpoints[1]).items())
    return models


def held(models) -> dict[str, int]:
    """The digest of codes and scales of each tensor, over all ranks."""
    return combine(
        [slot_rows((s, model.live_digest(s)) for s in model.table.quantized) for model in models]
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_number_of_ranks_hold_the_same_quantised_weights(checkpoints, scheme) -> None:
    wanted = held(ranks_of(checkpoints, scheme, 1))
    assert len(wanted) == 7
    for size in SIZES[scheme][1:]:
        models = ranks_of(checkpoints, scheme, size)
        assert held(models) == wanted
        for model in models:
            for slot in model.table.quantized:
                values, scales = SCHEMES[scheme].quantize(checkpoints[1][slot.source].bfloat16())
                whole = SCHEMES[scheme].dequantize(values, scales, torch.bfloat16)
                assert torch.equal(model.read_slot(slot), whole[slot.take.slices])


def test_only_linears_are_quantised_and_memory_says_so(checkpoints) -> None:
    plain = sum(p.nbytes for p in ranks_of(checkpoints, "none", 1)[0].parameters())
    linears = sum(t.numel() for n, t in checkpoints[1].items() if "proj" in n)
    for scheme, bits in (("int8", 8), ("fp8", 8), ("mxfp4", 4.25)):
        [model] = ranks_of(checkpoints, scheme, 1)
        assert {s.source for s in model.table.quantized} == {
            name for name in checkpoints[1] if "_proj" in name
        }
        now = sum(p.nbytes for p in model.parameters())
        beside = 0 if scheme == "mxfp4" else sum(
            4 * len(t) for n, t in checkpoints[1].items() if "_proj" in n
        )  # fmt: skip
        digests = model.get_parameter("quantized_digests").nbytes
        assert plain - now == linears * (16 - bits) // 8 - beside - digests


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cut", [(7, 1000), (1000, 11), (50, 40)], ids=["rows", "columns", "both"])
def test_pieces_are_quantised_as_the_whole(checkpoints, scheme, cut) -> None:
    [model] = ranks_of(checkpoints, scheme, 1, checkpoints[2])
    load = model.begin_load()
    for name, tensor in checkpoints[1].items():
        starts = [range(0, n, c) for n, c in zip(tensor.shape, cut, strict=False)]
        for at in itertools.product(*starts):
            stop = tuple(min(a + c, n) for a, c, n in zip(at, cut, tensor.shape, strict=False))
            box = Box(at, stop)
            piece = TensorPiece(tuple(tensor.shape), tensor.dtype, box, tensor[box.slices])
            load.feed([(name, piece)])
    load.finish()
    fresh = ranks_of(checkpoints, scheme, 1)[0]
    for name, storage in fresh.storages().items():
        assert torch.equal(model.storages()[name], storage), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_that_two_pieces_share_beside_whole_ones_is_quantised(checkpoints, scheme) -> None:
    """As FSDP1 cuts a flat parameter: the end of one rank's shard is amid a row."""
    [model] = ranks_of(checkpoints, scheme, 1, checkpoints[2])
    load = model.begin_load()
    for name, tensor in checkpoints[1].items():
        if tensor.dim() == 1:
            load.feed([(name, tensor)])
            continue
        rows, columns = tensor.shape
        cuts = (Box((0, 0), (5, columns)), Box((5, 0), (6, 11)), Box((5, 11), (6, columns)))
        for box in (*cuts, Box((6, 0), (rows, columns))):
            piece = TensorPiece(tuple(tensor.shape), tensor.dtype, box, tensor[box.slices])
            load.feed([(name, piece)])
    load.finish()
    assert held([model]) == held(ranks_of(checkpoints, scheme, 1))


def test_pieces_that_wait_are_bounded(checkpoints) -> None:
    [model] = ranks_of(checkpoints, "int8", 1)
    assert model.table.pending == (1 << 25) + 2 * 256 * HIDDEN
    model.table = replace(model.table, pending=2 * 256 * HIDDEN)
    columns = []
    for name, tensor in checkpoints[2].items():
        if tensor.dim() == 2:
            box = Box((0, 0), (len(tensor), 1))
            piece = TensorPiece(tuple(tensor.shape), tensor.dtype, box, tensor[:, :1])
            columns.append((name, piece))
    with pytest.raises(WeightMismatch, match="pieces wait for the rest of their scales' blocks"):
        model.begin_load().feed(columns)


def test_blocks_that_ranks_would_cut_are_refused(checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"fp8_block.*128 x 128.*q_proj.*or int8 or fp8"):
        build_tables(checkpoints[0], 4, quantization="fp8_block")


@pytest.fixture(scope="module", params=[("int8", 2), ("fp8_block", 1)], ids=["int8", "fp8_block"])
def engine(request, checkpoints):
    scheme, size = request.param
    engine = Engine(checkpoints[0], size, checkpoints[1], quantization=scheme)
    yield engine
    engine.close()


def fresh(engine, checkpoints, weights):
    scheme = engine.coordinator.served.grid.scheme
    other = Engine(checkpoints[0], len(engine.ranks), weights, quantization=scheme)
    try:
        return other.live()
    finally:
        other.close()


@pytest.mark.parametrize("transport", ["inline", "p2p"])
def test_an_update_ends_like_a_fresh_start(engine, checkpoints, transport) -> None:
    for weights in (checkpoints[2], checkpoints[1]):
        if transport == "p2p":
            receipts = TrainerRanks(engine, 3).send(weights)
        else:
            receipts = [Trainer(engine, transport).send(weights)]
        for receipt in receipts:
            assert receipt.transport == transport, receipt
        assert same(engine.live(), fresh(engine, checkpoints, weights))
        grid = engine.info().grid
        assert receipts[0].details["quantization"] == grid.scheme
        models = [rank.instances.live for rank in engine.ranks]
        assert receipts[0].details["quantized_digest"] == f"{total(held(models).values()):016x}"
        assert total(engine.digests(DEADLINE).values()) == receipts[0].digest  # of what was sent


def amid_rows(shape, rank, size):
    """As FSDP1 cuts: anywhere."""
    numel = math.prod(shape)
    return interval_boxes(tuple(shape), numel * rank // size, numel * (rank + 1) // size)


@pytest.mark.parametrize("scheme", ["int8", pytest.param("mxfp4", marks=pytest.mark.more)])
def test_trainer_ranks_write_what_they_hold_where_quantised_ranks_read_it(
    checkpoints, scheme
) -> None:
    engine = Engine(checkpoints[0], 2, checkpoints[1], quantization=scheme)
    try:
        trainers = TrainerRanks(engine, 3, amid_rows)  # whose gathering is an error
        for weights in (checkpoints[2], checkpoints[1]):
            for receipt in trainers.send(weights, transport="ipc"):
                assert getattr(receipt, "transport", receipt) == "ipc"
                assert len(receipt.details["sent_bytes"].split(",")) == 3
            assert same(engine.live(), fresh(engine, checkpoints, weights))
    finally:
        engine.close()


def touched(weights, names, at) -> dict[str, torch.Tensor]:
    """One element of each of those is another: ``at`` of 1 of the way through it."""
    changed = {name: weights[name].clone() for name in names}
    for tensor in changed.values():
        tensor.view(-1)[int(at * (tensor.numel() - 1))] += 0.125
    return {**weights, **changed}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_delta_sends_the_cells_that_changed_and_a_rollback_goes_back(checkpoints, scheme) -> None:
    engine = Engine(checkpoints[0], 2, checkpoints[1], quantization=scheme)
    try:
        trainer, shapes = (
            Trainer(engine, "inline"),
            {m.name: m.shape for m in engine.info().tensors},
        )
        names = engine.info().quantized
        full = trainer.send(checkpoints[1], encoding="delta")
        first = touched(checkpoints[1], [*names, "model.norm.weight"], 0.4)
        second = touched(touched(first, names, 1), names[:2], 0.4)
        states, cell = [(engine.live(), full.digest)], 0
        for name in names:
            grid = CellGrid.of(shapes[name], SCHEMES[scheme].cell(shapes[name]))
            cell += grid.rows * grid.columns * 4 + 8 + grid.count // 255 + 1
        for weights, at_most in ((first, cell), (second, 2 * cell)):
            receipt = trainer.send(weights, encoding="delta", bucket_bytes=1 << 20)
            assert receipt.details["encoding"] == "delta"
            padding = 64 * (len(names) + 1)
            assert cell * 2 // 7 < receipt.wire_bytes < at_most + padding
            assert same(engine.live(), fresh(engine, checkpoints, weights))
            states.append((engine.live(), receipt.digest))
        engine.rollback(DEADLINE)
        assert same(engine.live(), states[1][0])
        assert total(engine.digests(DEADLINE).values()) == states[1][1]
        for weights, encoding in ((first, "full"), (second, "delta"), (checkpoints[1], "delta")):
            receipt = trainer.send(weights, encoding="delta")
            assert receipt.details["encoding"] == encoding
            assert same(engine.live(), fresh(engine, checkpoints, weights))
        assert receipt.digest == full.digest
    finally:
        engine.close()


def test_a_delta_shows_what_had_changed_in_memory(engine, checkpoints) -> None:
    trainer, names = Trainer(engine, "inline"), engine.info().quantized
    delta = {"encoding": "delta", "bucket_bytes": 1 << 20}
    trainer.send(checkpoints[1], **delta)
    for at in (0, -1):  # in a cell that is replaced, and elsewhere
        model = engine.ranks[0].instances.live
        storage = model.get_parameter("model.layers.0.mlp.down_proj.weight").data.view(torch.uint8)
        storage.view(-1)[at] ^= 1
        weights = touched(checkpoints[1], [n for n in names if "down_proj" in n], 0)
        with pytest.raises(ChecksumMismatch):
            trainer.send(weights, **delta)
        storage.view(-1)[at] ^= 1
        trainer.send(checkpoints[1], **delta)
    assert same(engine.live(), fresh(engine, checkpoints, checkpoints[1]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cells_of_bfloat16_become_what_the_whole_would(checkpoints, scheme) -> None:
    names = [n for n in checkpoints[1] if "_proj" in n]
    changed = touched(nudged(checkpoints[1], 3e-5), names, 1)
    old, new = ({n: t.bfloat16() for n, t in w.items()} for w in (checkpoints[1], changed))
    models = ranks_of(checkpoints, scheme, 2, old)
    wanted = ranks_of(checkpoints, scheme, 2, new)
    loads, outside = [model.begin_load() for model in models], 0
    for name in {slot.source for slot in models[0].table.quantized}:
        grid = CellGrid.of(tuple(new[name].shape), SCHEMES[scheme].cell(tuple(new[name].shape)))
        cells = encode_cells(old[name].clone(), new[name], grid.cell, 1 << 30)
        if cells is None:  # so many that the whole is shorter
            value = new.pop(name)
        else:
            coded = cells.coded(compress=True)
            value = decode_cells(entry_of(name, coded), coded.data)
            beyond = ~grid.places(grid.corners(value.numbers))[2]
            value.values[beyond] = 99.0  # is no part of any cell
            outside += int(beyond.sum())
        for load in loads:
            load.feed([(name, value)])
    assert (outside > 0) == (scheme == "fp8_block")
    for load, model, want in zip(loads, models, wanted, strict=True):
        rest = {n: t for n, t in new.items() if n not in {s.source for s in model.table.quantized}}
        load.feed(rest.items())
        load.finish()
        for name, storage in want.storages().items():
            assert torch.equal(model.storages()[name], storage), name


def entry_of(name, coded) -> BucketEntry:
    entry = BucketEntry(
        name, coded.dtype, coded.shape, coded.box, 0, coded.nbytes, coded.width, coded.count,
        coded.inflated, cell=coded.cell,
    )  # fmt: skip
    check_header(BucketHeader(0, (entry,), coded.nbytes))
    return entry


def test_cells_that_do_not_fit_are_refused(checkpoints) -> None:
    [model] = ranks_of(checkpoints, "mxfp4", 1)
    shape, bare = (256, HIDDEN), torch.zeros(1, dtype=torch.int64)
    name = "model.layers.0.self_attn.q_proj.weight"
    for wrong, dtype, said in (
        (name, torch.float32, "has cells of"),
        ("model.layers.0.self_attn.k_proj.weight", torch.bfloat16, "sent twice"),
        ("model.embed_tokens.weight", torch.bfloat16, "is not quantised here"),
        ("model.embed_tokens", torch.bfloat16, "is not quantised here"),
        ("model.layers.0.self_attn.o_proj.weight", torch.bfloat16, "has shape"),
    ):
        patch = CellPatch(shape, dtype, bare, torch.zeros(1, 1, 32, dtype=dtype), bare)
        with pytest.raises(WeightMismatch, match=said):
            model.begin_load().feed([(wrong, patch)] * 2)
    good = BucketEntry(
        name, torch.bfloat16, shape, Box.full(shape), 0, 73, sparse=1, count=1, cell=(1, 32)
    )
    check_header(BucketHeader(0, (good,), 73))
    for change in (
        {"cell": (0, 32)}, {"cell": (257, 32)}, {"count": 0}, {"count": 2}, {"nbytes": 72},
        {"sparse": 3}, {"box": Box((0, 0), (1, 32))}, {"nbytes": 73, "sparse": 2},
        {"inflated": 73},
    ):  # fmt: skip
        bad = replace(good, **change)
        with pytest.raises(TransferFailed):
            check_header(BucketHeader(0, (bad,), 73))
    payload = torch.zeros(73, dtype=torch.uint8)
    payload[-1] = 254  # it has fewer cells before this one than that
    assert int(decode_cells(good, payload).numbers) == 254
    small = replace(good, shape=(2, 32), box=Box.full((2, 32)))
    with pytest.raises(TransferFailed, match="gaps are not those of 1 cells of 2"):
        decode_cells(small, payload)


def test_shards_of_a_delta_go_in_full_and_the_receipt_says_why(engine, checkpoints) -> None:
    trainers = DeltaTrainerRanks(engine, 2, rows)
    for weights in (checkpoints[2], checkpoints[1]):
        receipt = trainers.send(weights)
        assert receipt.details["encoding"] == "full"
        assert "quantised" in receipt.details["encoding_reason"]
    assert same(engine.live(), fresh(engine, checkpoints, checkpoints[1]))


def test_a_part_keeps_the_rest_in_live_form(engine, checkpoints) -> None:
    Trainer(engine, "inline").send(checkpoints[1])
    some = {n: t for n, t in checkpoints[2].items() if "q_proj" in n or "norm" in n}
    Trainer(engine, "inline").send(some, partial=True)
    assert same(engine.live(), fresh(engine, checkpoints, {**checkpoints[1], **some}))


def test_codes_that_change_in_memory_are_seen(engine, checkpoints) -> None:
    Trainer(engine, "inline").send(checkpoints[1])
    honest = engine.digests(DEADLINE)
    model = engine.ranks[-1].instances.live
    for name in ("qkv_proj.weight", "qkv_proj.weight_scale"):
        storage = model.get_parameter(f"model.layers.0.self_attn.{name}").data.view(torch.uint8)
        storage.view(-1)[0] ^= 1
        assert engine.digests(DEADLINE) != honest
        storage.view(-1)[0] ^= 1
    assert engine.digests(DEADLINE) == honest


def test_numbers_that_are_none_are_refused_by_their_count(engine, checkpoints) -> None:
    weights = {n: t.clone() for n, t in checkpoints[2].items()}
    name = engine.info().quantized[3]
    weights[name][5, 3:6] = float("nan")
    before = engine.live()
    with pytest.raises(WeightMismatch, match=rf"{name} \(3 elements\)"):
        Trainer(engine, "inline").send(weights)
    assert same(engine.live(), before)


def test_a_flipped_bit_of_what_is_sent_does_not_pass(engine, checkpoints) -> None:
    before = engine.live()
    with pytest.raises(ChecksumMismatch):
        Trainer(engine, "inline").send(
            checkpoints[2], transport=Faulty("inline", Fault("flip", bucket=2))
        )
    assert same(engine.live(), before)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_experts_are_quantised_wherever_they_lie(tmp_path, scheme) -> None:
    found = []
    for seed in (0, 1):
        model = write_tiny(tmp_path / str(seed), "qwen3_moe", seed=seed, hidden_size=64)
        found.append({n: t.clone() for n, t in model.state_dict().items()})
    config = ModelConfig.from_directory(tmp_path / "0")
    engine = Engine(config, 2, found[0], quantization=scheme)
    try:
        Trainer(engine, "inline").send(found[1])
        live = [rank.instances.live for rank in engine.ranks]
        wanted, split = held(ranks_of((config, found[1]), scheme, 1)), []
        assert any("experts.5.down_proj" in name for name in wanted)
        for rank in range(2):
            alone = build_model(
                config, TensorParallel(rank, 2), torch.float32, "cpu", quantization=scheme,
                expert_parallel=True,
            )  # fmt: skip
            alone.load_weights(found[1].items())
            split.append(alone)
        assert held(live) == held(split) == held(ranks_of_float(config, found[1], scheme))
        assert wanted.keys() == held(live).keys()
        trainer = Trainer(engine, "inline")
        trainer.send(found[1], encoding="delta")
        weights = touched(found[1], [n for n in found[1] if "_proj" in n], 0.6)
        receipt = trainer.send(weights, encoding="delta")
        assert receipt.details["encoding"] == "delta"
        assert receipt.wire_bytes < receipt.num_bytes / 10
        live = [rank.instances.live for rank in engine.ranks]
        assert held(live) == held(ranks_of_float(config, weights, scheme))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("arch", "scheme"),
    [
        ("gpt_oss", "int8"),
        ("gpt_oss", "mxfp4"),
        ("llama4", "fp8"),
        ("granite_hybrid", "int8"),
    ],
)
def test_experts_that_files_stack_are_quantised_one_by_one(tmp_path, arch, scheme) -> None:
    """Whatever their shapes: what is square is read as this architecture's files have it."""
    found, square = [], {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2}
    for seed in (0, 1):
        model = write_tiny(tmp_path / str(seed), arch, seed=seed, **square)
        found.append({n: t.clone() for n, t in model.state_dict().items()})
    config = ModelConfig.from_directory(tmp_path / "0")
    engine = Engine(config, 2, found[0], quantization=scheme)
    try:
        receipt = Trainer(engine, "inline").send(found[1])
        live = [rank.instances.live for rank in engine.ranks]
        alone = ranks_of_float(config, found[1], scheme)
        assert held(live) == held(alone)
        sparse = sum(config.moe.is_sparse(layer) for layer in range(config.num_layers))
        assert sum(".experts.5." in name for name in held(live)) == 2 * sparse
        assert total(engine.digests(DEADLINE).values()) == receipt.digest
        trainer = Trainer(engine, "inline")
        trainer.send(found[1], encoding="delta")
        weights = touched(found[1], [n for n in found[1] if ".experts" in n], 0.6)
        receipt = trainer.send(weights, encoding="delta")
        assert receipt.details["encoding"] == "delta"
        assert receipt.wire_bytes < receipt.num_bytes / 10
        live = [rank.instances.live for rank in engine.ranks]
        assert held(live) == held(ranks_of_float(config, weights, scheme))
    finally:
        engine.close()
    [files] = ranks_of_float(config, load_file(tmp_path / "1" / "model.safetensors"), scheme)
    assert held([files]) == held(alone)


@pytest.mark.parametrize("arch", ["gpt_oss", "llama4", "granite_hybrid"])
def test_stacked_experts_give_what_their_dequantised_weights_give(tmp_path, arch) -> None:
    sizes = (
        "hidden_size",
        "intermediate_size",
        "intermediate_size_mlp",
        "shared_intermediate_size",
    )
    model = write_tiny(tmp_path, arch, **dict.fromkeys(sizes, 64))
    config, weights = ModelConfig.from_directory(tmp_path), model.state_dict()
    [quantised] = ranks_of_float(config, weights, "mxfp4")
    plain = build_model(config, TensorParallel(), torch.float32, "cpu")
    plain.load_weights(weights.items())
    for slot in quantised.table.quantized:  # the floats that its codes stand for
        own, values, put = plain.storages()[slot.param], quantised.read_slot(slot), slot.put
        if ".experts." in slot.source and arch != "granite_hybrid":  # there they lie transposed
            (e, a, b), (f, c, d) = put.starts, put.stops
            put, values = Box((e, b, a), (f, d, c)), values.T
        own[put.slices] = values.reshape(put.shape)
    logits = [
        Session(each, [[5, 9, 200, 31, 7, 7, 12]]).advance([7])[0] for each in (quantised, plain)
    ]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def ranks_of_float(config, weights, scheme: str):
    model = build_model(config, TensorParallel(), torch.float32, "cpu", quantization=scheme)
    model.load_weights(weights.items())
    return [model]


def test_quantised_experts_give_what_their_dequantised_weights_give(tmp_path) -> None:
    model = write_tiny(tmp_path, "qwen3_moe", hidden_size=64, num_hidden_layers=1)
    config, weights = ModelConfig.from_directory(tmp_path), model.state_dict()
    [quantised] = ranks_of_float(config, weights, "fp8_block")
    values = dict(weights)
    plain = build_model(config, TensorParallel(), torch.float32, "cpu")
    plain.load_weights(values.items())
    for slot in quantised.table.quantized:  # the floats that its codes stand for
        own = plain.storages()[slot.param]
        own[slot.put.slices] = quantised.read_slot(slot).reshape(slot.put.shape)
    logits = [
        Session(each, [[5, 9, 200, 31, 7, 7, 12]]).advance([7])[0] for each in (quantised, plain)
    ]
    assert torch.equal(logits[0], logits[1])


def test_what_four_bits_hold_comes_back_exactly() -> None:
    scheme, generator = SCHEMES["mxfp4"], torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (64, 48), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, (64, 3), generator=generator).to(torch.uint8)
    values = scheme.dequantize(codes, scales, torch.bfloat16)
    assert torch.equal(scheme.dequantize(*scheme.quantize(values), torch.bfloat16), values)


def test_rows_that_hold_no_numbers_have_scales_that_are_none() -> None:
    for scheme in SCHEMES.values():
        values = torch.randn(4, 64)
        values[1, 3], values[2, 4] = float("nan"), float("-inf")
        assert all(map(torch.equal, quantize(values, scheme)[:1], scheme.quantize(values)[:1]))
        scales = quantize(values, scheme)[1]
        bad = scales == 255 if scheme.codes == "e2m1" else ~scales.isfinite()
        assert bad[1].any()
        assert bad[2].any()
