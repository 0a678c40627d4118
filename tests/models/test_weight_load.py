"""Every kind of value gets in the same way: in place, once, complete, or refused by name."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import Session
from tiny_models import write_tiny

from rollout.distributed import TensorParallel
from rollout.errors import WeightMismatch
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.models.layers.base import Layer
from rollout.weights import Box, LazyTensor, SparsePatch, TensorPiece, TileLayout

LAYOUTS = ["plain", "tiles"]
PLACES = [(0, 1), (1, 2), (3, 4)]
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A config with every kind of parameter, and two sets of weights for it."""
    path = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": 317, "num_attention_heads": 8, "head_dim": 12}
    bias = {"attention_bias": True, "mlp_bias": True}
    first = write_tiny(path, "llama", **shape, **bias).state_dict()
    second = write_tiny(path, "llama", seed=1, **shape, **bias).state_dict()
    return ModelConfig.from_directory(path), first, second


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    path = tmp_path_factory.mktemp("tied")
    weights = write_tiny(path, "qwen2", tied=True, vocab_size=317).state_dict()
    return ModelConfig.from_directory(path), weights


def empty(config, place=(0, 1), layout="plain", dtype=torch.float32):
    model = build_model(config, TensorParallel(*place), dtype, "cpu", layout)
    for parameter in model.parameters():
        parameter.data.fill_(-3.0)  # what was there before must not matter
    model.after_load()
    return model


def cold(config, weights, place=(0, 1), layout="plain", dtype=torch.float32):
    model = empty(config, place, layout, dtype)
    model.load_weights(weights.items())
    return model


def bits(model):
    return {name: p.data.clone() for name, p in model.named_parameters()}


def assert_same_bits(a, b):
    ours, theirs = bits(a), bits(b)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def patch_between(old, new):
    positions = (old != new).flatten().nonzero().flatten()
    return SparsePatch(tuple(new.shape), new.dtype, positions, new.flatten()[positions])


def pieces_of(value, cuts):
    """Cut a tensor along each of its dimensions at the given fractions."""
    grid = [()]
    for size in value.shape:
        edges = sorted({0, size, *(int(c * size) for c in cuts)})
        grid = [(*g, pair) for g in grid for pair in pairwise(edges)]
    for pairs in grid:
        box = Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        yield TensorPiece(tuple(value.shape), value.dtype, box, value[box.slices])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_live_update_leaves_the_bits_of_a_fresh_start(tiny, place, layout):
    config, first, second = tiny
    live = cold(config, first, place, layout)
    addresses = {name: p.data_ptr() for name, p in live.named_parameters()}
    live.load_weights(reversed(second.items()))
    assert_same_bits(live, cold(config, second, place, layout))
    assert addresses == {name: p.data_ptr() for name, p in live.named_parameters()}
    shadow = live.empty_like()
    shadow.load_weights(second.items())
    assert_same_bits(live, shadow)
    assert not set(addresses.values()) & {p.data_ptr() for p in shadow.parameters()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_patch_leaves_the_bits_of_a_dense_reload(tiny, place, layout):
    config, first, _ = tiny
    generator = torch.Generator().manual_seed(5)
    changed = {}
    for name, value in first.items():
        keep = torch.rand(value.shape, generator=generator) < 0.9
        changed[name] = torch.where(keep, value, value + 1)
    live = cold(config, first, place, layout)
    load = live.begin_load()
    load.feed((name, patch_between(first[name], changed[name])) for name in changed)
    report = load.finish()
    assert report.loaded == set(changed)
    dense = cold(config, changed, place, layout)
    assert_same_bits(live, dense)
    everything = sum(p.numel() * 4 for p in live.parameters())
    assert 0 < report.nbytes < everything / 5


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_disjoint_pieces_make_the_whole(tiny, place, layout):
    config, first, _ = tiny
    model = empty(config, place, layout)
    load = model.begin_load()
    for name, value in first.items():
        load.feed((name, piece) for piece in reversed(list(pieces_of(value, (0.31, 0.5, 0.77)))))
    load.finish()
    assert_same_bits(model, cold(config, first, place, layout))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    given_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_tiles_write_and_read_any_box_like_a_plain_matrix(data, dtype, given_dtype):
    shape, layout = (48, 6), TileLayout()

    def side(size):
        a, b = data.draw(st.integers(0, size)), data.draw(st.integers(0, size))
        return min(a, b), max(a, b)

    rows, columns = side(48), side(6)
    box = Box((rows[0], columns[0]), (rows[1], columns[1]))
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    storage = torch.zeros(layout.storage_shape(shape), dtype=dtype)
    layout.write(storage, shape, Box.full(shape), plain)
    # A slice that starts at an odd element, as a bucket's does.
    value = torch.randn(box.numel + 1, generator=torch.Generator().manual_seed(2))
    value = value.to(given_dtype)[1:].reshape(box.shape)
    layout.write(storage, shape, box, value)
    plain[box.slices] = value.to(dtype)
    assert torch.equal(layout.read(storage, shape, Box.full(shape)), plain)
    assert torch.equal(layout.read(storage, shape, box), plain[box.slices])


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.floats(0, 1), max_size=3),
    layout=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(["piece", "patch"]),
)
def test_any_cut_of_any_tensor_lands_where_the_whole_would(tiny, cuts, layout, kind):
    config, first, second = tiny
    live = cold(config, first, (1, 2), layout)
    load = live.begin_load()
    for name, value in second.items():
        whole = value
        if kind == "piece":
            load.feed((name, piece) for piece in pieces_of(whole, cuts))
        else:
            load.feed([(name, patch_between(first[name], whole))])
    load.finish()
    assert_same_bits(live, cold(config, second, (1, 2), layout))


def test_a_rank_needs_only_the_pieces_of_its_own_boxes(tiny):
    config, first, _ = tiny
    model = empty(config, (1, 2))
    load = model.begin_load()
    for name, value in first.items():
        for slot in model.table.slots[name]:
            piece = TensorPiece(slot.shape, value.dtype, slot.take, value[slot.take.slices])
            load.feed([(name, piece)])
    load.finish()
    assert_same_bits(model, cold(config, first, (1, 2)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lazy_tensor_is_asked_for_the_boxes_of_the_table_alone(tiny, layout):
    config, first, _ = tiny
    asked = []

    def lazy(name):
        def read(box):
            asked.append((name, box))
            return first[name][box.slices]

        return LazyTensor(tuple(first[name].shape), first[name].dtype, read)

    model = empty(config, (1, 4), layout)
    model.load_weights((name, lazy(name)) for name in first)
    wanted = [(n, s.take) for n, slots in model.table.slots.items() for s in slots]
    assert sorted(asked, key=repr) == sorted(wanted, key=repr)
    assert_same_bits(model, cold(config, first, (1, 4), layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_any_float_dtype_are_cast_once(tiny, layout):
    config, first, _ = tiny
    for given_dtype in (torch.float64, torch.float32, torch.float16):
        values = {name: value.to(given_dtype) for name, value in first.items()}
        model = cold(config, values, layout=layout, dtype=torch.bfloat16)
        for name, slots in model.table.slots.items():
            assert torch.equal(model.read_slot(slots[0]), values[name].to(torch.bfloat16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", PLACES)
def test_slots_read_back_what_was_loaded_and_padding_is_zero(tiny, place, layout):
    config, first, _ = tiny
    model = cold(config, first, place, layout)
    for name, slots in model.table.slots.items():
        for slot in slots:
            assert torch.equal(model.read_slot(slot), first[name][slot.take.slices])
    for name, spec in model.table.params.items():
        for box in spec.padding:
            storage = model.get_parameter(name).data
            assert not spec.layout.read(storage, spec.shape, box).any()
    assert layout == "plain" or any(s.layout.name == "tiles" for s in model.table.params.values())


def test_metadata_is_the_complete_set_in_file_form(tiny, tied):
    for config, weights, drop in [(*tiny[:2], set()), (*tied, {HEAD})]:
        model = build_model(config, TensorParallel(1, 2), torch.bfloat16, "meta")
        got = {m.name: (m.dtype, m.shape) for m in model.weight_metadata()}
        wanted = {k: (torch.bfloat16, tuple(v.shape)) for k, v in weights.items() if k not in drop}
        assert got == wanted


def test_everything_wrong_is_named_in_one_error(tiny):
    config, first, _ = tiny
    bad = dict(first)
    del bad[NORM], bad["model.layers.1.mlp.up_proj.weight"]
    bad["model.layers.0.self_attn.q_prj.weight"] = torch.zeros(1)
    bad[HEAD] = torch.zeros(3, 4)
    bad["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int64)
    with pytest.raises(WeightMismatch) as caught:
        empty(config).load_weights(bad.items())
    text = str(caught.value)
    assert "'model.layers.0.self_attn.q_prj.weight'" in text
    assert "nearest known is 'model.layers.0.self_attn.q_proj.weight'" in text
    assert "lm_head.weight: has shape (3, 4), the model needs (317, 64)" in text
    assert "model.layers.0.mlp.up_proj.weight: has dtype torch.int64" in text
    missing = f"{{{HEAD!r}, 'model.layers.0.mlp.up_proj.weight', "
    missing += f"'model.layers.1.mlp.up_proj.weight', {NORM!r}}}"
    assert f"Following weights were not initialized from checkpoint: {missing}" in text


def test_a_head_alone_that_is_missing_asks_whether_it_is_tied(tiny):
    config, first, _ = tiny
    for absent, asked in (([HEAD], True), ([NORM], False), ([HEAD, NORM], False)):
        with pytest.raises(WeightMismatch) as caught:
            empty(config).load_weights((k, v) for k, v in first.items() if k not in absent)
        assert ("; is tie_word_embeddings meant" in str(caught.value)) is asked


def test_where_much_is_wrong_the_text_names_the_first_and_counts_the_rest(tiny, caplog):
    config, first, _ = tiny
    bad = {f"other.{number}": torch.zeros(1) for number in range(100)}
    with caplog.at_level("DEBUG", "rollout.models"), pytest.raises(WeightMismatch) as caught:
        empty(config).load_weights(bad.items())
    text = str(caught.value)
    assert text.startswith("Following weights were not initialized from checkpoint: {'")
    assert f"' and {len(first) - 8} more}}; unknown tensor 'other.0'" in text
    assert text.endswith("; unknown tensor 'other.6'; and 93 more")
    assert len(caught.value.problems) == 101
    assert all(repr(name) in caplog.text for name in first)


def test_frequencies_of_old_checkpoints_are_skipped(tiny):
    config, first, _ = tiny
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}
    report = empty(config).load_weights({**first, **extra}.items())
    assert report.loaded == set(first)
    near_miss = {"model.layers.0.self_attn.my_rotary_emb.inv_freq": torch.zeros(6)}
    with pytest.raises(WeightMismatch, match="my_rotary_emb"):
        empty(config).load_weights({**first, **near_miss}.items())


def refused(config, items, match, **finish):
    def send():
        load = empty(config).begin_load()
        load.feed(items)
        load.finish(**finish)

    with pytest.raises(WeightMismatch, match=match):
        send()


def test_duplicates_are_refused(tiny):
    config, first, _ = tiny
    norm = first[NORM]
    whole, low, high = (TensorPiece((64,), norm.dtype, Box((a,), (b,)), norm[a:b]) for a, b in
                        [(0, 64), (0, 40), (40, 64)])  # fmt: skip
    refused(config, [(NORM, norm), (NORM, norm)], "model.norm.weight: was sent twice")
    refused(config, [(NORM, norm), (NORM, low)], "whole, and in pieces")
    refused(config, [(NORM, low), (NORM, norm)], "was sent twice")
    refused(
        config, [(NORM, low), (NORM, whole)], r"pieces \(0,\)..\(40,\) and \(0,\)..\(64,\) overlap"
    )
    refused(config, [(NORM, low), (NORM, high), (NORM, low)], "was sent twice")


def test_pieces_that_do_not_cover_are_missing_even_in_a_partial_update(tiny):
    config, first, _ = tiny
    norm = first[NORM]
    low = TensorPiece((64,), norm.dtype, Box((0,), (40,)), norm[:40])
    refused(config, [(NORM, low)], "do not cover", partial=True)
    others = [(n, v) for n, v in first.items() if n != NORM]
    refused(config, [*others, (NORM, low)], r"checkpoint: \{'model.norm.weight'\}")


def test_malformed_patches_and_pieces_are_refused(tiny):
    config, first, _ = tiny
    norm = first[NORM]

    def patch(positions, values=2, dtype=torch.int64):
        positions = torch.tensor(positions, dtype=dtype)
        return [(NORM, SparsePatch((64,), norm.dtype, positions, torch.zeros(values)))]

    refused(config, patch([3, 64]), "outside")
    refused(config, patch([-1, 3]), "outside")
    refused(config, patch([5, 3]), "unique and ascending")
    refused(config, patch([5, 5]), "unique and ascending")
    refused(config, patch([5, 6, 7]), "equally many")
    refused(config, patch([5, 6], dtype=torch.int32), "equally many")
    outside = TensorPiece((64,), norm.dtype, Box((60,), (70,)), torch.zeros(10))
    refused(config, [(NORM, outside)], "outside")
    crooked = TensorPiece((64,), norm.dtype, Box((0,), (10,)), torch.zeros(9))
    refused(config, [(NORM, crooked)], "came as")
    lazy = LazyTensor((64,), norm.dtype, lambda box: torch.zeros(3))
    refused(config, [(NORM, lazy)], "reader returned shape")


def test_a_partial_load_reports_what_it_did_not_touch(tiny):
    config, first, second = tiny
    live = cold(config, first)
    load = live.begin_load()
    load.feed([(NORM, second[NORM])])
    report = load.finish(partial=True)
    assert report.loaded == {NORM}
    assert report.missing == set(first) - {NORM}
    assert report.nbytes == 64 * 4
    assert_same_bits(live, cold(config, {**first, NORM: second[NORM]}))


def test_what_follows_from_weights_is_derived_once_by_each_layer_after_each_load(tiny, monkeypatch):
    config, first, second = tiny
    model, own, calls = empty(config), Layer.after_load, Counter()

    def counted(layer):
        calls[layer] += 1
        own(layer)

    monkeypatch.setattr(Layer, "after_load", counted)
    once = Counter(m for m in model.modules() if isinstance(m, Layer))
    for weights in (first, second):
        calls.clear()
        model.load_weights(weights.items())
        assert calls == once
    calls.clear()
    load = model.begin_load()
    load.feed([(NORM, first[NORM])])
    assert not calls
    with pytest.raises(WeightMismatch):
        load.finish()
    assert not calls  # of what was refused nothing follows
    load = model.begin_load()
    load.feed([(NORM, first[NORM])])
    load.finish(partial=True)
    assert calls == once


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [[EMBED, HEAD], [HEAD, EMBED]])
@pytest.mark.parametrize("kind", ["tensor", "lazy", "piece"])
def test_a_tied_head_may_be_sent_and_must_equal_the_embedding(tied, kind, order, layout):
    config, weights = tied

    def form(value):
        if kind == "tensor":
            return [value.clone()]
        if kind == "piece":
            return list(pieces_of(value, (0.4,)))
        return [LazyTensor(tuple(value.shape), value.dtype, lambda box: value[box.slices])]

    def send(head, place):
        load = empty(config, place, layout).begin_load()
        load.feed((n, v) for n, v in weights.items() if n not in (EMBED, HEAD))
        for name in order:
            for part in form(head if name == HEAD else weights[EMBED]):
                load.feed([(name, part)])
                if kind == "tensor":
                    part.zero_()  # the sender reuses its memory
        return load.finish()

    different = weights[EMBED].clone()
    different[200, 3] = -different[200, 3]
    for place in PLACES:
        assert HEAD in send(weights[EMBED], place).loaded
    for place, sees_it in [((0, 1), True), ((0, 2), False), ((1, 2), True)]:
        if sees_it:
            with pytest.raises(WeightMismatch, match=f"{HEAD}: differs from {EMBED}"):
                send(different, place)
        else:
            send(different, place)  # another rank refuses, and with it the update


def test_a_tied_head_may_be_left_out_but_its_owner_may_not(tied):
    config, weights = tied
    without_head = {k: v for k, v in weights.items() if k != HEAD}
    model = cold(config, without_head)
    assert HEAD not in model.table.slots
    without_owner = {k: v for k, v in weights.items() if k != EMBED}
    with pytest.raises(WeightMismatch, match=r"checkpoint: \{'model.embed_tokens.weight'\}"):
        empty(config).load_weights(without_owner.items())


def test_patches_of_a_tied_head_must_change_the_same_elements(tied):
    config, weights = tied
    old, new = weights[EMBED], weights[EMBED].clone()
    new[[3, 250], 7] += 1
    patch = patch_between(old, new)
    fewer = SparsePatch(patch.shape, patch.dtype, patch.positions[:1], patch.values[:1])
    other = SparsePatch(patch.shape, patch.dtype, patch.positions, patch.values + 1)
    for sent, fails in [(patch, False), (fewer, True), (other, True)]:
        for pair in ([(EMBED, patch), (HEAD, sent)], [(HEAD, sent), (EMBED, patch)]):
            load = cold(config, weights, layout="tiles").begin_load()
            load.feed(pair)
            if fails:
                with pytest.raises(WeightMismatch, match="differs from"):
                    load.finish(partial=True)
            else:
                load.finish(partial=True)


def test_outputs_follow_an_update_at_once(tiny):
    config, first, second = tiny
    sequence = [[5, 9, 300, 2]]
    live = cold(config, first)
    before = Session(live, sequence).advance([4])[0]
    live.load_weights(second.items())
    after = Session(live, sequence).advance([4])[0]
    fresh = Session(cold(config, second), sequence).advance([4])[0]
    assert torch.equal(after, fresh)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("place", PLACES)
def test_whole_tensors_by_a_plan_leave_the_bits_of_feeding_them(tiny, place):
    """In the load that made it and in later ones, of any rank, and cast."""
    config, first, second = tiny
    live = cold(config, first, place)
    load = live.begin_load()
    plan = load.plan(_wholes(second))
    for weights in (second, {name: value.bfloat16() for name, value in first.items()}):
        assert load.feed_planned(plan, [*weights.values()])
        assert not load.feed_planned(plan, [*weights.values()])  # they were sent already
        assert load.finish().nbytes == plan.nbytes
        assert_same_bits(live, cold(config, weights, place))
        noted = empty(config, place)
        load.journal.copy(live.storages(), noted.storages())
        assert_same_bits(live, noted)
        load = live.begin_load()
    cut = [value[1:] if name == NORM else value for name, value in second.items()]
    before = bits(live)
    assert not load.feed_planned(plan, cut)
    assert not load.feed_planned(plan, [value.int() for value in second.values()])
    assert all(torch.equal(value, before[name]) for name, value in bits(live).items())


@pytest.mark.parametrize("place", PLACES)
def test_boxes_by_a_plan_leave_the_bits_of_whole_tensors(tiny, place):
    """As FSDP and tensor parallelism cut them, beside what nobody has cut."""
    config, first, second = tiny
    live = cold(config, first, place)
    load = live.begin_load()
    parts = [
        (name, box if value.dim() > 1 else None)
        for name, value in second.items()
        for box in (_cut(value) if value.dim() > 1 else [None])
    ]
    plan = load.plan(parts)
    for weights in (second, {name: value.bfloat16() for name, value in first.items()}):
        values = [weights[n] if box is None else weights[n][box.slices] for n, box in parts]
        assert load.feed_planned(plan, values)
        assert not load.feed_planned(plan, values)  # they were sent already
        assert load.finish().nbytes == plan.nbytes
        assert_same_bits(live, cold(config, weights, place))
        load = live.begin_load()
    name, [some, *_] = EMBED, _cut(second[EMBED])
    assert load.feed_planned(load.plan([(name, some)]), [second[name][some.slices]])
    assert not load.feed_planned(load.plan([(name, None)]), [second[name]])  # some of it came
    with pytest.raises(WeightMismatch, match=f"{{.*{name}.*}}"):  # and not the rest
        load.finish()
    load = live.begin_load()
    assert load.feed_planned(load.plan([(name, None)]), [second[name]])
    assert not load.feed_planned(load.plan([(name, some)]), [second[name][some.slices]])


def _cut(value):
    """Rows among three ranks, the last one's columns between two."""
    rows, columns = value.shape
    third, half = -(-rows // 3), columns // 2
    return [
        Box((0, 0), (third, columns)),
        Box((third, 0), (2 * third, columns)),
        Box((2 * third, 0), (rows, half)),
        Box((2 * third, half), (rows, columns)),
    ]


def _wholes(names):
    return [(name, None) for name in names]


def test_what_is_more_than_a_copy_has_no_plan(tiny, tied):
    config, first, _ = tiny
    load = cold(config, first, layout="tiles", dtype=torch.bfloat16).begin_load()
    assert load.plan(_wholes([NORM])) is not None
    assert load.plan(_wholes(["model.layers.0.mlp.down_proj.weight"])) is None
    load = cold(config, first).begin_load()
    assert load.plan(_wholes([NORM, NORM])) is None
    assert load.plan(_wholes([NORM, "model.unknown.weight"])) is None
    config, weights = tied
    load = cold(config, weights).begin_load()
    assert load.plan(_wholes(name for name in weights if name != HEAD)) is not None
    assert load.plan(_wholes([HEAD])) is None
