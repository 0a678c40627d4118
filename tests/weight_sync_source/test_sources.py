"""What a trainer may pass in one process: modules, dicts, iterables, directories; and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from weight_sync_source.jobs.tiny import ALIASES, Tiny, expected

from rollout.errors import ConfigError, SourceFailed, TransferFailed, WeightMismatch
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.trainer.sources.base import LocalSource, WeightSource, held_values
from rollout.weight_sync.trainer.sources.components import together
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weight_sync.trainer.sources.names import Naming, bind
from rollout.weight_sync.trainer.sources.plain import PlainSource
from rollout.weight_sync.trainer.sources.spelled import LocalSpelledSource
from rollout.weights import Box, TensorMeta
from rollout.weights.names import file_form
from rollout.weights.spellings import Spellings
from rollout.weights.wanted import WantedWeights, by_name

BF16, FP32 = torch.bfloat16, torch.float32
OWNER = "model.embed_tokens.weight"


def streamed(obj: Any, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    source = detect(obj).source(WantedWeights(aliases=ALIASES, dtype=dtype))
    metadata = source.metadata()
    for name, tensor in source:
        assert name not in found
        found[name] = tensor.clone()
    if metadata is not None:
        assert [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in found.items()] == list(metadata)
    return found


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_names_lose_whole_wrapper_components_and_nothing_else() -> None:
    assert file_form("module._orig_mod.model.layers.0._checkpoint_wrapped_module.q.weight") == (
        "model.layers.0.q.weight"
    )
    assert file_form("_fsdp_wrapped_module.module.a.module.b") == "a.module.b"
    assert file_form("my_orig_mod.modules.module") == "my_orig_mod.modules.module"
    assert file_form("module") == "module"


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_module_sends_its_state_dict_cast_once_with_a_tied_head_once(
    dtype: torch.dtype, tied: bool
) -> None:
    assert_equal(streamed(Tiny(tied), dtype), expected(Tiny(tied), dtype, tied))


@pytest.mark.parametrize("known_by", [{}, ALIASES])
def test_a_head_that_the_trainer_alone_ties_is_sent_by_itself(known_by: dict[str, str]) -> None:
    wanted = expected(Tiny(), BF16, tied=bool(known_by))
    held = [TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in wanted.items()]
    source = detect(Tiny()).source(
        WantedWeights(aliases=known_by, dtype=BF16, tensors=by_name(held))
    )
    assert_equal(dict(source), wanted)


@pytest.mark.parametrize("tied", [True, False])
def test_a_state_dict_and_its_items_send_the_same_as_the_module(tied: bool) -> None:
    state = Tiny(tied).state_dict()
    wanted = expected(Tiny(tied), BF16, tied)
    assert_equal(streamed(state, BF16), wanted)
    if not tied:
        assert_equal(streamed(iter(state.items()), BF16), wanted)


def test_an_iterables_alias_goes_under_its_own_name_only_beside_its_owner() -> None:
    weight = torch.randn(3)
    both = [("lm_head.weight", weight), ("x", weight), (OWNER, weight)]
    assert list(streamed(iter(both))) == ["x", OWNER, "lm_head.weight"]
    assert list(streamed(iter(both[:2]))) == ["x", OWNER]
    assert list(streamed(iter(reversed(both)))) == [OWNER, "x", "lm_head.weight"]


def test_a_head_without_its_owner_is_sent_under_the_owners_name() -> None:
    weight = torch.randn(3)
    assert list(streamed({"lm_head.weight": weight})) == [OWNER]
    assert list(streamed({"lm_head.weight": weight, OWNER: weight})) == [OWNER]
    untied = {"lm_head.weight": weight, OWNER: weight.clone()}
    assert list(streamed(untied)) == ["lm_head.weight", OWNER]


def test_two_tensors_of_one_name_are_a_mismatch_and_one_tensor_twice_is_not() -> None:
    weight = torch.randn(3)
    assert list(bind([("a.w", weight), ("module.a.w", weight)], {})) == ["a.w"]
    with pytest.raises(WeightMismatch, match=r"a\.w"):
        bind([("a.w", weight), ("module.a.w", weight.clone())], {})


def test_integers_travel_as_they_are() -> None:
    found = streamed({"steps": torch.arange(3), "flags": torch.tensor([True])}, BF16)
    assert [t.dtype for t in found.values()] == [torch.int64, torch.bool]


def test_a_streams_scales_of_inputs_are_left_out_but_for_a_models_own() -> None:
    codes = torch.ones(2, 2, dtype=torch.int8)
    held = {"a.weight": codes, "a.weight_scale": torch.ones(1)}
    held |= {"a.input_scale": torch.ones(1), "b.q_scale": torch.ones(1)}
    known = [TensorMeta(name, FP32, (1,)) for name in ("a.weight", "b.q_scale")]
    for obj in (held, iter(held.items())):
        source = detect(obj).source(WantedWeights(dtype=FP32, tensors=by_name(known)))
        assert [name for name, _ in source] == ["a.weight", "b.q_scale"]


def test_what_the_trainers_iterator_raises_is_the_cause() -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(1)
        raise ZeroDivisionError("no luck")

    source = detect(broken()).source(WantedWeights(dtype=FP32))
    with pytest.raises(SourceFailed, match=r"'a'.*no luck") as caught:
        list(source)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


NO_PAIRS: list[tuple[object, str]] = [
    ("a", "got 'a'; leave out what is no tensor"),
    (3, "got int; leave out"),
    (("a", 1), "got ('a', int); leave out what is no tensor"),
    (("a",), "got ('a'); give the name and the tensor"),
    (("a", torch.zeros(1), 1), "got ('a', Tensor, int); give the name and the tensor, and nothing"),
    ((1, torch.zeros(1)), "got (int, Tensor); a name is a text"),
    ((torch.zeros(1), "a"), "got (Tensor, 'a'); the name comes first"),
    (("a", torch.zeros(9).numpy()), "got ('a', numpy.ndarray); make a tensor of it by torch.from"),
    (("a", {}), "got ('a', dict); if 'a' is the model's, pass that by itself"),
    (nn.Linear(1, 1), "got a Linear: pass the module itself"),
    (torch.zeros(1), "got a Tensor without its name: pass the module, or named_parameters()"),
]


@pytest.mark.parametrize(("item", "says"), NO_PAIRS, ids=[says[:24] for _, says in NO_PAIRS])
def test_items_that_are_no_pairs_are_named_with_the_remedy(item: object, says: str) -> None:
    expected = re.escape(f"expected (name, tensor), {says}")
    with pytest.raises(SourceFailed, match=f"^{expected}"):
        detect([item]).source(WantedWeights(dtype=FP32))
    good = ("b", torch.zeros(1))
    for items, where in (([item], "at the start"), ([good, item], "after 'b'")):
        with pytest.raises(SourceFailed, match=f"^{where}: {expected}"):
            list(detect(iter(items)).source(WantedWeights(dtype=FP32)))


def test_a_source_that_holds_nothing_is_an_error(tmp_path: Path) -> None:
    for empty in (nn.ReLU(), {}):
        with pytest.raises(SourceFailed, match="no tensor"):
            detect(empty).source(WantedWeights(dtype=FP32))
    with pytest.raises(SourceFailed, match="no tensor"):
        list(detect(iter([])).source(WantedWeights(dtype=FP32)))
    with pytest.raises(SourceFailed, match="safetensors"):
        detect(tmp_path).source(WantedWeights(dtype=FP32))


def test_a_path_that_is_no_directory_is_told_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'no/such/directory': no such directory here"):
        detect("no/such/directory")
    with pytest.raises(ConfigError, match=r"'aaa.*aaa: no such directory here; check the path"):
        detect("a" * 5000)
    file = tmp_path / "model.safetensors"
    file.touch()
    for path in (file, str(file)):
        with pytest.raises(ConfigError, match=r"model\.safetensors is a file; give the directory"):
            detect(path)


@pytest.mark.parametrize("odd", [3, None, torch.zeros(2), b"bytes"])
def test_an_unknown_object_is_refused_naming_what_is_accepted(odd: object) -> None:
    with pytest.raises(ConfigError, match="FSDP2"):
        detect(odd).source(WantedWeights(dtype=FP32))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_directory_sends_its_checkpoint(tmp_path: Path, form: str) -> None:
    state = {k: v.clone() for k, v in Tiny(tied=False).state_dict().items()}
    names = sorted(state)
    for part, chosen in enumerate((names[:5], names[5:])):
        tensors = {name: state[name] for name in chosen}
        if form == "bin":
            torch.save(tensors, tmp_path / f"pytorch_model-{part}.bin")
        else:
            save_file(tensors, tmp_path / f"model-{part}.safetensors")
    wanted = expected(Tiny(tied=False), BF16, tied=False)
    assert_equal(streamed(tmp_path, BF16), wanted)
    assert_equal(streamed(str(tmp_path), BF16), wanted)


def test_a_broken_checkpoint_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    with pytest.raises(SourceFailed, match=r"model\.safetensors"):
        detect(tmp_path).source(WantedWeights(dtype=FP32))


def test_a_weight_source_is_taken_as_it_is() -> None:
    inner = detect(Tiny()).source(WantedWeights(dtype=FP32))
    assert isinstance(inner, WeightSource)
    assert detect(inner).source(WantedWeights(dtype=FP32)) is inner


PREFIXES = {"model.language_model.": "model.", "model.visual.": "", "mtp.": "mtp:mtp."}


class Own:
    """A trainer's own source, under the names of a release's files."""

    def __init__(self, *names: str, known: bool = True) -> None:
        self.agreement, self.known, self.closed = Agreement(), known, False
        self.held = {name: torch.full((2,), float(n)) for n, name in enumerate(names)}

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        return tuple(TensorMeta(n, FP32, (2,)) for n in self.held) if self.known else None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from self.held.items()
        finally:
            self.closed = True

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(name, [Box.full((2,))]) for name in self.held]

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        return [(Box.full((2,)), self.held[name])]


@pytest.mark.parametrize("known", [True, False])
def test_names_of_a_weight_source_are_placed_as_those_of_any_other(known: bool) -> None:
    own = Own("model.language_model.norm.weight", "model.visual.a.weight", "mtp.fc.weight",
              known=known)  # fmt: skip
    source = detect(own).source(WantedWeights(dtype=FP32, prefixes=PREFIXES))
    wanted = ["model.norm.weight", "mtp:mtp.fc.weight"]
    assert (metas := source.metadata()) is None or [meta.name for meta in metas] == wanted
    assert (metas is not None) == known
    assert {name: float(t[0]) for name, t in source} == dict(zip(wanted, [0.0, 2.0], strict=True))
    assert source.agreement is own.agreement
    assert isinstance(source, LocalSource)
    assert [name for name, _ in source.local_boxes()] == wanted
    assert [float(source.local_values(name)[0][1][0]) for name in wanted] == [0.0, 2.0]
    own.closed = False
    items = iter(source)
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert own.closed
    placed = Own("model.norm.weight", "mtp:mtp.fc.weight")
    assert detect(placed).source(WantedWeights(dtype=FP32, prefixes=PREFIXES)) is placed


class OwnHeld(Own):
    """One that says that its tensors stay where they are."""

    held_values = Own.local_values


def test_what_says_that_its_tensors_stay_says_so_under_other_names_and_among_components() -> None:
    name, wanted = "model.language_model.norm.weight", WantedWeights(dtype=FP32, prefixes=PREFIXES)
    for own, stays in ((Own(name), False), (OwnHeld(name), True)):
        source = detect(own).source(wanted)
        beside = together({"policy": source, "draft": PlainSource(*_plain("a"))}, own.agreement)
        assert isinstance(source, LocalSource)
        assert isinstance(beside, LocalSource)
        for one in (source, beside):
            found = held_values(one, "model.norm.weight")
            assert (found is not None) == stays
            assert not found or found[0][1] is own.held[name]
        assert held_values(beside, "draft:a") is not None


def _plain(name: str) -> tuple[Any, ...]:
    held = {name: torch.zeros(2)}
    return held, Naming({}, FP32, lambda raw: raw), Agreement()


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor_are_read_where_they_lie_unless_they_are_turned(
    transposed: bool,
) -> None:
    shapes = {
        f"model.layers.0.mlp.experts.{index}.{part}_proj.weight": shape
        for index in range(2)
        for part, shape in {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}.items()
    }
    spellings = Spellings.of(shapes)
    fused = {name: torch.rand(one.shape) for name, one in spellings.fused.items()}
    if transposed:
        fused = {name: tensor.mT.contiguous() for name, tensor in fused.items()}
    source = LocalSpelledSource(
        PlainSource(fused, Naming({}, FP32, lambda raw: raw), Agreement()), spellings
    )
    found = source.at_hand()
    held = {name: source.held_values(name) for name in shapes}
    assert (found is None) == transposed
    for name, values in held.items():
        assert values is None or values[0][1].is_contiguous() != transposed, name
    if found is None:
        return
    memory = {tensor.untyped_storage().data_ptr() for tensor in fused.values()}
    assert dict(found).keys() == shapes.keys()
    for name, tensor in found:
        [(box, values)] = held[name] or ()
        assert (tuple(tensor.shape), box) == (shapes[name], Box.full(shapes[name]))
        assert torch.equal(tensor, values)
        assert {x.untyped_storage().data_ptr() for x in (tensor, values)} <= memory


@pytest.mark.parametrize("known", [True, False])
def test_a_weight_source_of_which_nothing_is_taken_says_so(known: bool) -> None:
    own = Own("model.visual.a.weight", "model.visual.b.weight", known=known)
    with pytest.raises(SourceFailed, match=r"of the Own nothing can be sent.*model\.visual\.a"):
        list(detect(own).source(WantedWeights(dtype=FP32, prefixes=PREFIXES)))


def test_a_rank_outside_the_source_is_told_so(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"rank 0 .* ranks 1, 2"):
            Agreement.over((1, 2), 1.0)
    finally:
        dist.destroy_process_group()


def test_a_rank_that_only_follows_holds_no_values() -> None:
    follower = Agreement(rank=1, ranks=(0, 1))
    source = detect(Tiny()).source(WantedWeights(aliases=ALIASES, dtype=BF16), group=follower)
    assert all(t.device.type == "meta" and t.dtype == BF16 for _, t in source)


def test_an_agreement_of_one_raises_the_error_itself() -> None:
    alone = Agreement()
    alone.vote(None, 1.0)
    assert alone.broadcast({"a": 1}, 1.0) == {"a": 1}
    with pytest.raises(TransferFailed, match=r"^link$"):
        alone.vote(TransferFailed("link"), 1.0)
    trip = ValueError("tripped")
    with pytest.raises(SourceFailed, match="ValueError: tripped") as caught:
        alone.vote(trip, 1.0)
    assert caught.value.__cause__ is trip
