"""Streams of lazy tensors from files: what is read, in which format, and what is refused."""

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from forked import Script
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.loader import open_checkpoint
from rollout.loader.sharded_state import save_shard
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.weights import Box, TensorMeta, WeightSlot
from rollout.weights.files import open_weights

NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return path, write_tiny(path, "qwen3", vocab_size=317)


@pytest.fixture
def tiny(original, tmp_path):
    """A copy that a test may damage, and the true values."""
    path = tmp_path / "copy"
    shutil.copytree(original[0], path)
    return path, original[1].state_dict()


def sharded(path, weights, parts=3):
    """Rewrite ``path`` as shards with an index; returns the file of each tensor."""
    (path / "model.safetensors").unlink(missing_ok=True)
    where = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        names = sorted(weights)[part::parts]
        save_file({n: weights[n].contiguous() for n in names}, path / name)
        where.update(dict.fromkeys(names, name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def contents(checkpoint):
    return {name: lazy.read(Box.full(lazy.shape)) for name, lazy in checkpoint.items()}


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name in got:
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize("form", ["one file", "shards", "bin", "pt shards"])
@pytest.mark.parametrize("explicit", [True, False])
def test_every_format_yields_the_tensors_that_were_saved(tiny, form, explicit):
    path, weights = tiny
    if form == "shards":
        sharded(path, weights)
    if form in ("bin", "pt shards"):
        (path / "model.safetensors").unlink()
        torch.save({"stray": 1}, path / "training_args.bin")
    if form == "bin":
        torch.save(weights, path / "pytorch_model.bin")
    if form == "pt shards":
        halves = [dict(list(weights.items())[i::2]) for i in range(2)]
        where = {}
        for i, half in enumerate(halves):
            torch.save(half, path / f"pytorch_model-{i}.bin")
            where.update(dict.fromkeys(half, f"pytorch_model-{i}.bin"))
        index = path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": where}))
    kind = "pt" if form in ("bin", "pt shards") else "safetensors"
    with open_checkpoint(str(path), load_format=kind if explicit else "auto") as checkpoint:
        assert checkpoint.load_format == kind
        assert checkpoint.directory == path
        assert {m.name: (m.shape, m.dtype) for m in checkpoint.metadata()} == {
            n: (tuple(v.shape), v.dtype) for n, v in weights.items()
        }
        assert checkpoint.bytes_read == 0
        assert_equal(contents(checkpoint), weights)
        assert checkpoint.bytes_read == sum(v.numel() * 4 for v in weights.values())


def test_boxes_of_one_two_and_no_dimensions_are_read_exactly(tmp_path):
    values = {
        "scalar": torch.tensor(2.5),
        "line": torch.randn(11),
        "plane": torch.randn(7, 9).bfloat16(),
        "cube": torch.randn(3, 4, 5),
    }
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(str(tmp_path)) as checkpoint:
        lazy = dict(checkpoint.items())
        assert torch.equal(lazy["scalar"].read(Box((), ())), values["scalar"])
        for name, box, numel in [
            ("line", Box((3,), (8,)), 5),
            ("plane", Box((2, 3), (6, 5)), 8),
            ("plane", Box((0, 8), (7, 9)), 7),
            ("cube", Box((1, 0, 2), (2, 4, 3)), 4),
        ]:
            before = checkpoint.bytes_read
            part = lazy[name].read(box)
            assert torch.equal(part, values[name][box.slices])
            assert part.dtype == values[name].dtype
            assert checkpoint.bytes_read - before == numel * part.element_size()
        with pytest.raises(ValueError, match="outside"):
            lazy["line"].read(Box((0,), (12,)))


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_each_rank_of_two_reads_half_of_what_is_split(tiny, form):
    path, weights = tiny
    if form == "pt":
        (path / "model.safetensors").unlink()
        torch.save(weights, path / "pytorch_model.bin")
    config = ModelConfig.from_directory(path)
    split = sum(v.numel() * 4 for n, v in weights.items() if "norm" not in n)
    replicated = sum(v.numel() * 4 for n, v in weights.items() if "norm" in n)
    total = 0
    for rank in range(2):
        model = build_model(config, TensorParallel(rank, 2), torch.float32, "cpu")
        with open_checkpoint(str(path)) as checkpoint:
            model.load_weights(checkpoint.items())
            assert abs(checkpoint.bytes_read - (split / 2 + replicated)) < 64 * 4 * 4
            total += checkpoint.bytes_read
        for name, slots in model.table.slots.items():
            for slot in slots:
                assert torch.equal(model.read_slot(slot), weights[name][slot.take.slices])
    assert total == split + 2 * replicated


def test_shards_that_the_index_does_not_name_are_dropped(tiny):
    path, weights = tiny
    sharded(path, weights)
    save_file({NORM: torch.zeros(64)}, path / "model-99999-of-99999.safetensors")
    save_file({EMBED: torch.zeros(3)}, path / "consolidated.safetensors")
    with open_checkpoint(str(path)) as checkpoint:
        assert_equal(contents(checkpoint), weights)


@pytest.mark.parametrize("kept", [True, False])
def test_an_index_that_an_earlier_save_left_beside_a_whole_file_is_passed_over(tiny, kept):
    """transformers' ``save_pretrained`` removes the shards of an earlier one, not their index."""
    path, weights = tiny
    where = sharded(path, {name: torch.zeros_like(value) for name, value in weights.items()})
    if not kept:
        for name in set(where.values()):
            (path / name).unlink()
    save_file({n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors")
    with open_checkpoint(str(path)) as checkpoint:
        assert_equal(contents(checkpoint), weights)


def test_a_tensor_that_a_shard_repeats_comes_from_where_the_index_says(tiny):
    path, weights = tiny
    where = sharded(path, weights)
    other = next(name for name in where.values() if name != where[NORM])
    held = load_file(path / other)
    save_file({**held, NORM: torch.full((64,), 9.0)}, path / other)
    with open_checkpoint(str(path)) as checkpoint:
        assert_equal(contents(checkpoint), weights)


def test_consolidated_files_beside_the_usual_ones_are_ignored(tiny):
    path, weights = tiny
    save_file({EMBED: torch.zeros(3)}, path / "consolidated.00.safetensors")
    with open_checkpoint(str(path)) as checkpoint:
        assert_equal(contents(checkpoint), weights)
    (path / "model.safetensors").rename(path / "consolidated.00.safetensors")
    with open_checkpoint(str(path)) as checkpoint:
        assert_equal(contents(checkpoint), weights)


def refused(path, match, load_format="auto"):
    with pytest.raises(ConfigError, match=match) as caught:
        open_checkpoint(str(path), load_format=load_format)
    return str(caught.value)


def test_hidden_files_are_no_weights(tiny):
    """As a Mac, and writers that rename what is complete, have them beside the others."""
    path, weights = tiny
    (path / "._model.safetensors").write_bytes(b"\0\5\x16\7Mac OS X")
    with open_checkpoint(str(path)) as checkpoint:
        assert_equal(contents(checkpoint), weights)


def test_missing_places_and_files_are_named(tiny, tmp_path):
    path, weights = tiny
    refused(tmp_path / "nowhere", "nowhere' is no directory")
    refused(path / "config.json", "is a file; give the directory")
    refused(tmp_path, "holds no config.json")
    refused(path, r"holds no \*.bin or \*.pt or \*.pth weights", "pt")
    refused(path, "Load format `nope` is not supported", "nope")
    refused(path, "needs the model's metadata", "dummy")
    where = sharded(path, weights)
    (path / where[NORM]).unlink()
    refused(path, f"lacks {where[NORM]}, named by model.safetensors.index.json; download")
    (path / "model.safetensors.index.json").unlink()
    for file in path.glob("*.safetensors"):
        file.unlink()
    refused(path, r"holds no \*.safetensors or")


def test_a_broken_index_is_named(tiny):
    path, weights = tiny
    where = sharded(path, weights)
    index = path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/x"}}'):
        index.write_text(text)
        refused(path, "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {**where, "extra.weight": where[NORM]}}))
    refused(path, f"'extra.weight' in {where[NORM]}")


def test_truncated_and_foreign_files_are_named(tiny):
    path, weights = tiny
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:6], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        refused(path, r"model.safetensors is truncated or no safetensors file .* download")
    file.unlink()
    torch.save(weights, path / "pytorch_model.bin")
    whole = (path / "pytorch_model.bin").read_bytes()
    for damaged in (whole[: len(whole) // 2], b""):
        (path / "pytorch_model.bin").write_bytes(damaged)
        refused(path, r"pytorch_model.bin is truncated or no torch file .* download")


def test_the_same_tensor_in_two_files_without_an_index_is_refused(tiny):
    path, _ = tiny
    save_file({NORM: torch.zeros(64)}, path / "other.safetensors")
    refused(path, f"{NORM} is in both")


class Payload:
    def __reduce__(self):
        return (open, ("/tmp/should-not-exist", "w"))


def test_a_pickle_that_holds_more_than_tensors_is_refused(tiny):
    path, weights = tiny
    (path / "model.safetensors").unlink()
    torch.save({**weights, "x": Payload()}, path / "pytorch_model.bin")
    refused(path, "holds more than tensors")
    torch.save({"model": weights}, path / "pytorch_model.bin")
    refused(path, "is no state dict of tensors")


def test_files_from_before_the_zip_format_are_read(tiny):
    path, weights = tiny
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with open_checkpoint(str(path)) as checkpoint:
        assert_equal(contents(checkpoint), weights)


def test_dummy_values_depend_on_name_position_and_seed_alone(tiny):
    path, _ = tiny
    (path / "model.safetensors").unlink()
    config = ModelConfig.from_directory(path)
    whole = build_model(config, TensorParallel(), torch.bfloat16, "cpu")
    metadata = whole.weight_metadata()

    def dummy(seed=0):
        return open_checkpoint(str(path), load_format="dummy", metadata=metadata, seed=seed)

    whole.load_weights(dummy().items())
    for rank in range(4):
        part = build_model(config, TensorParallel(rank, 4), torch.bfloat16, "cpu", "tiles")
        part.load_weights(dummy().items())
        for name, slots in part.table.slots.items():
            full = dict(dummy().items())[name].read(Box.full(slots[0].shape))
            for slot in slots:
                assert torch.equal(part.read_slot(slot), full[slot.take.slices])
    values = contents(dummy())
    assert not torch.equal(values[DOWN], contents(dummy(seed=1))[DOWN])
    other_layer = values[DOWN.replace("layers.0", "layers.1")]
    assert not torch.equal(values[DOWN], other_layer)


def test_dummy_values_look_random(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    metas = [
        TensorMeta("a.weight", torch.float32, (400, 300)),
        TensorMeta("input_layernorm.weight", torch.float32, (4000,)),
    ]
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy", metadata=metas)
    a, norm = (lazy.read(Box.full(lazy.shape)) for _, lazy in checkpoint.items())
    assert abs(a.mean()) < 1e-3
    assert abs(a.std() / (0.05 / 3**0.5) - 1) < 0.02
    assert len(a.unique()) > 0.99 * a.numel()
    centred = a - a.mean()
    for shifted in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, -1), (0, 1))):
        assert abs((centred * shifted).mean() / centred.var()) < 0.02
    assert abs(norm.mean() - 1) < 5e-3


def test_progress_is_drawn_on_request_alone(tiny, capfd):
    path, _ = tiny
    with open_checkpoint(str(path)) as checkpoint:
        list(checkpoint.items())
    assert "Loading weights" not in capfd.readouterr().err
    with open_checkpoint(str(path), progress=True) as checkpoint:
        list(checkpoint.items())
    assert "Loading weights" in capfd.readouterr().err


def test_closing_twice_is_harmless_and_frees_the_files(tiny):
    path, _ = tiny
    checkpoint = open_checkpoint(str(path))
    checkpoint.close()
    checkpoint.close()


# Prints, of every tensor, what reading it says once the file has been cut in half.
CUT = """
import os, sys
from pathlib import Path
from rollout.errors import ConfigError
from rollout.weights import Box
from rollout.weights.files import open_weights

directory, file, mapped = sys.argv[1:]
_, files = open_weights(Path(directory), mapped=mapped == "mapped")
values = {name: meta.shape for name, meta in files.metadata().items()}
os.truncate(file, os.path.getsize(file) // 2)
for name, shape in values.items():
    try:
        files.read(name, Box.full(shape)).clone()
    except ConfigError as error:
        print(name, "|", error)
"""


def in_form(form: str, path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The file of weights in ``path``, as one of that form."""
    file = path / "model.safetensors"
    if form == "safetensors":
        return file
    file.unlink()
    if form == "pt":
        file = path / "pytorch_model.bin"
        torch.save(weights, file)
        return file
    boxes = {name: Box.full(tuple(value.shape)) for name, value in weights.items()}
    held = [
        (WeightSlot(name, box.shape, box, name, box), weights[name]) for name, box in boxes.items()
    ]
    save_shard(path, 0, 1, held, save="one")
    return path / "rank-00000-of-00001.safetensors"


@pytest.mark.parametrize("how", ["read", "mapped"])
@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_a_file_that_gets_shorter_while_it_is_read_is_named(tiny, tmp_path, form, how):
    """Who only maps it is ended by SIGBUS."""
    path, weights = tiny
    file = in_form(form, path, weights)
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    process = Script(script, [str(path), str(file), how], tmp_path / "log")
    told = process.stdout.read().decode().splitlines()
    code = process.wait(60)
    process.close()
    assert code == 0, (tmp_path / "log").read_text()
    assert 0 < len(told) < len(weights)
    for line in told:
        name, said = line.split(" | ")
        assert f"{file} ends within {name}: it has become shorter" in said


# Opens a file again and again that another process empties and writes.
OPENED_AND_WRITTEN = """
import os, sys, time
from contextlib import suppress
from pathlib import Path
from rollout.errors import ConfigError
from rollout.weights.files import Shards
from rollout.weights.files.safetensors_files import SafetensorsFiles

file, until = Path(sys.argv[1]), time.monotonic() + 1.0
whole = file.read_bytes()
if not (child := os.fork()):
    fd = os.open(file, os.O_RDWR)
    while time.monotonic() < until:
        os.ftruncate(fd, 0)
        os.pwrite(fd, whole, 0)
    os._exit(0)
while time.monotonic() < until:
    with suppress(ConfigError):
        SafetensorsFiles(Shards((file,)), mapped=False).close()
os.waitpid(child, 0)
SafetensorsFiles(Shards((file,)), mapped=False).close()
"""


def test_a_file_that_gets_shorter_while_its_header_is_read_ends_no_process(tmp_path):
    script = tmp_path / "written.py"
    script.write_text(OPENED_AND_WRITTEN)
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    process = Script(script, [str(tmp_path / "a.safetensors")], tmp_path / "log")
    code = process.wait(60)
    process.close()
    assert code == 0, (tmp_path / "log").read_text()


@pytest.mark.parametrize("form", ["safetensors", "pt", "sharded_state"])
def test_a_file_that_is_written_while_it_is_read_is_named(tiny, form):
    """A start beside a trainer that saves there must not serve a mixture of two checkpoints."""
    path, weights = tiny
    file = in_form(form, path, weights)
    os.utime(file, (0, 0))
    with open_checkpoint(str(path)) as checkpoint:
        items = checkpoint.items()
        next(items)[1].read(Box.full(weights[EMBED].shape))
        file.write_bytes(file.read_bytes())
        with pytest.raises(ConfigError, match=f"{file} was written while it was read"):
            list(items)


@pytest.mark.parametrize("mapped", [False, True])
def test_views_in_a_torch_file_are_read_box_by_box(tmp_path, mapped):
    base = torch.randn(9, 11)
    values = {"turned": base.T, "part": base[2:7, 3:9], "line": base[:, 4], "none": base[:0]}
    torch.save(values, tmp_path / "pytorch_model.bin")
    _, files = open_weights(tmp_path, mapped=mapped)
    with closing(files):
        for name, value in values.items():
            assert torch.equal(files.read(name, Box.full(tuple(value.shape))), value), name
        assert torch.equal(files.read("turned", Box((1, 2), (5, 8))), base.T[1:5, 2:8])


@pytest.mark.parametrize("mapped", [False, True])
def test_boxes_are_read_in_long_runs_and_in_short_ones(tmp_path, mapped):
    """Every place where a box can be cut, of rows that are worth a read of their own and others."""
    values = {"short": torch.randn(6, 5, 40), "long": torch.randn(3, 4, 20_000)}
    save_file(values, tmp_path / "model.safetensors")
    _, files = open_weights(tmp_path, mapped=mapped)
    with closing(files):
        for name, meta in files.metadata().items():
            a, b, c = meta.shape
            held = []
            for box in (
                Box((1, 0, 0), (a, b, c)), Box((1, 1, 0), (a - 1, b, c)),
                Box((0, 1, 0), (a, b - 1, c)), Box((1, 1, 3), (a, b - 1, c - 1)),
                Box((0, 0, 7), (a, b, 7)), Box((2, 2, 2), (3, 3, 3)),
            ):  # fmt: skip
                held.append((box, files.read(name, box)))
            for box, values_read in held:  # what was read before is still what it was
                assert torch.equal(values_read, values[name][box.slices])


def test_values_that_were_never_saved_are_refused(tmp_path):
    torch.save({"ghost": torch.empty(3, device="meta")}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="ghost was saved without its values"):
        open_checkpoint(str(tmp_path))
