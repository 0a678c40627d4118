"""Formats beside plain files: ranks' own files, URLs, registered loaders; and what a load costs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.engine.tokenizer import Tokenizer
from rollout.errors import ConfigError, IncompleteUpdate
from rollout.generation import ChatOptions
from rollout.loader import (
    LoadRequest,
    find_loader,
    open_checkpoint,
    portable,
    register_loader,
    resolve_model,
)
from rollout.loader.remote import RemoteReader
from rollout.loader.sharded_state import ShardedFiles, save_shard
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.weights import Box

pytestmark = pytest.mark.usefixtures("forked_ranks")

CPU = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("formats") / "tiny"
    write_tiny(path, "qwen3", seed=0, tokenizer=True)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A trainer's model of the same shape, and what a fresh engine of it says."""
    path = tmp_path_factory.mktemp("formats") / "other"
    model = write_tiny(path, "qwen3", seed=1)
    with Rollout(str(path), **CPU) as r:
        return model, said(r)


def said(r: Rollout):
    sample = r.generate(PROMPT, GREEDY)[0].outputs[0]
    return sample.token_ids, sample.logprobs.raw


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("saved_by", [1, pytest.param(2, marks=pytest.mark.more)])
def test_what_ranks_saved_starts_engines_of_any_number_of_ranks(tiny, other, tmp_path, saved_by):
    """Live weights, after an update; the same bits at any number of ranks."""
    model, want = other
    with Rollout(str(tiny), tensor_parallel_size=saved_by, weight_layout="tiles", **CPU) as r:
        version = r.update_weights(model).version
        assert r.save_sharded_state(tmp_path / "state") == version
        with Rollout.connect(r.address) as client, pytest.raises(ConfigError, match="owns the"):
            client.save_sharded_state(tmp_path / "x")
    names = sorted(path.name for path in (tmp_path / "state").glob("rank-*"))
    assert names == [f"rank-{i:05d}-of-{saved_by:05d}.safetensors" for i in range(saved_by)]
    (tmp_path / "other").touch()  # others may read them as far as the umask allows
    modes = {(tmp_path / path).stat().st_mode for path in ("other", *(f"state/{n}" for n in names))}
    assert len(modes) == 1
    for size, load_format in ((1, "auto"), (3 - saved_by, "sharded_state")):
        with Rollout(
            str(tmp_path / "state"), tensor_parallel_size=size, load_format=load_format, **CPU
        ) as r:
            assert r.check_weights(model).equal
            if size == 1:
                assert said(r) == want
    (tmp_path / "state" / names[-1]).unlink()
    with pytest.raises(ConfigError, match=r"ranks' files|files of ranks"):
        open_checkpoint(str(tmp_path / "state"), load_format="sharded_state")


@pytest.mark.more
def test_a_rank_reads_its_own_boxes_of_its_own_file_alone(tiny, tmp_path):
    with Rollout(str(tiny), tensor_parallel_size=2, **CPU) as r:
        r.save_sharded_state(tmp_path)
    held = weights(tiny)
    tables = build_tables(ModelConfig.from_directory(tiny), 2)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.load_format == "sharded_state"
        lazy = dict(checkpoint.items())
        for table in tables:
            for name, slots in table.slots.items():
                for slot in slots:
                    assert torch.equal(lazy[name].read(slot.take), held[name][slot.take.slices])
        for name, value in held.items():
            assert torch.equal(lazy[name].read(Box.full(tuple(value.shape))), value)


LOADED = re.compile(
    r"rank (\d) read [\d.]+ \w+ in [\d.]+ s and holds [\d.]+ \w+ of weights on cpu, [\d.]+ s after"
)
TRACED = re.compile(
    r"rollout rank (\d): (\S+) \[.*\] float32: read (\d+) bytes in [\d.]+ ms -> (.*)"
)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_load_says_what_each_rank_read_and_where_it_went(tiny, capfd, caplog, ranks):
    """And of ranks that load one after the other, the second begins when the first has ended."""
    caplog.set_level(logging.INFO, "rollout.engine.core")
    settings = {"trace_load": True, "max_parallel_loading_workers": 1, "executor": "auto"}
    with Rollout(str(tiny), tensor_parallel_size=ranks, **settings, **CPU) as r:
        held = r.weight_info().tensors
    logged = [found[1] for line in caplog.messages if (found := LOADED.match(line))]
    assert logged == [str(rank) for rank in range(ranks)]
    said = map(TRACED.fullmatch, capfd.readouterr().err.splitlines())
    lines = [found.groups() for found in said if found]
    assert [rank for rank, *_ in lines] == sorted(rank for rank, *_ in lines)
    sizes = {meta.name: meta.nbytes for meta in held}
    for rank in range(ranks):
        of = {
            name: (int(read), where) for number, name, read, where in lines if int(number) == rank
        }
        assert of.keys() == sizes.keys()
        name = "model.layers.1.mlp.up_proj.weight"
        rows = 128 // ranks
        where = f"model.layers.1.mlp.gate_up_proj.weight[{rows}:{2 * rows}, 0:64]"
        assert of[name] == (sizes[name] // ranks, where)
        assert of["model.norm.weight"][0] == sizes["model.norm.weight"]  # which every rank has


@pytest.mark.parametrize("saved_by", [1, 2])
def test_what_ranks_saved_updates_an_engine_and_is_compared_with_it(
    tiny, other, tmp_path, saved_by
):
    model, _ = other
    state = tmp_path / "state-3"
    with Rollout(str(tiny), tensor_parallel_size=saved_by, **CPU) as r:
        r.update_weights(model)
        r.save_sharded_state(state)
    with Rollout(str(tiny), weight_dirs=(str(tmp_path),), **CPU) as r:
        assert r.preflight(state).problems == ()
        assert not r.check_weights(state).equal
        r.update_weights(state)
        assert r.check_weights(model).equal
        assert r.check_weights(state).equal
        r.rollback()
        r.update_weights(server_path=state)
        assert r.check_weights(model).equal
        (file, *_) = state.glob("rank-*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(IncompleteUpdate, match=f"{file} is truncated"):
            r.update_weights(server_path=state)
        size = file.stat().st_size
        for length in (size // 3, size + 1):  # as a copy that was stopped leaves it
            os.truncate(file, length)
        with file.open("rb") as opened:
            if os.lseek(opened.fileno(), size, os.SEEK_HOLE) > size:
                pytest.skip("this file system does not tell")
        with pytest.raises(IncompleteUpdate, match="never written to its end"):
            r.update_weights(server_path=state)
        assert r.check_weights(model).equal


def test_files_of_two_saves_are_no_checkpoint(tiny, tmp_path):
    """The second save replaced one rank's file and failed before the other's."""
    tables, held = build_tables(ModelConfig.from_directory(tiny), 2), weights(tiny)

    def save(rank, name):
        slots = [slot for slots in tables[rank].slots.values() for slot in slots]
        values = ((slot, held[slot.source][slot.take.slices]) for slot in slots)
        save_shard(tmp_path, rank, 2, values, save=name)

    for rank in (0, 1):
        save(rank, "first")
    ShardedFiles(tmp_path).close()
    save(0, "second")
    with pytest.raises(ConfigError, match=r"different saves .*second.*first.* save again"):
        ShardedFiles(tmp_path)
    save(1, "second")
    ShardedFiles(tmp_path).close()


@pytest.mark.more
def test_a_save_that_fails_on_one_rank_is_found_when_it_is_opened(tiny, other, tmp_path):
    failing = tmp_path / "rank-00001-of-00002.part"
    with Rollout(str(tiny), tensor_parallel_size=2, **CPU) as r:
        r.save_sharded_state(tmp_path)
        r.update_weights(other[0])
        failing.touch()  # the second rank cannot write there
        with pytest.raises(ConfigError, match=r"rank-00001-of-00002.* was not written"):
            r.save_sharded_state(tmp_path)
        with pytest.raises(ConfigError, match="different saves"):
            open_checkpoint(str(tmp_path))
        failing.unlink()
        r.save_sharded_state(tmp_path)
        open_checkpoint(str(tmp_path)).close()


def test_a_save_takes_the_place_of_what_another_number_of_ranks_saved(tiny, other, tmp_path):
    """Beside each other neither could be read, however often either was saved again."""
    model, _ = other
    with Rollout(str(tiny), **CPU) as r:
        r.save_sharded_state(tmp_path)
        (tmp_path / "rank-00000-of-00001.safetensors").rename(
            tmp_path / "rank-00001-of-00002.safetensors"
        )
        for part in ("rank-00000-of-00001.part", "rank-00000-of-00002.part"):  # of killed engines
            (tmp_path / part).mkdir()
            (tmp_path / part / ".tmpXyZ").touch()
        r.update_weights(model)
        r.save_sharded_state(tmp_path)
        assert [path.name for path in tmp_path.glob("rank-*")] == [
            "rank-00000-of-00001.safetensors"
        ]
        assert r.check_weights(tmp_path).equal


def test_a_config_that_cannot_be_copied_beside_saved_weights_is_named(tiny, tmp_path):
    (tmp_path / "config.json").mkdir()
    with Rollout(str(tiny), **CPU) as r:
        with pytest.raises(ConfigError, match=rf"not copied to {tmp_path} .*config\.json.* again"):
            r.save_sharded_state(tmp_path)
        (tmp_path / "config.json").rmdir()
        r.save_sharded_state(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())


def test_a_quantised_engine_saves_no_sharded_state(tiny, tmp_path):
    with (
        Rollout(str(tiny), quantization="mxfp4", **CPU) as r,
        pytest.raises(ConfigError, match="from an engine without quantization"),
    ):
        r.save_sharded_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


@pytest.fixture
def url(tiny):
    """A checkpoint in fsspec's memory, in two files under an index."""
    root = f"memory://{uuid.uuid4().hex}/model"
    fs = fsspec.filesystem("memory")
    path = root.removeprefix("memory:/")
    held = weights(tiny)
    fs.mkdirs(path)
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
    where = {}
    for index in range(2):
        part = dict(list(held.items())[index::2])
        name = f"model-{index}.safetensors"
        fs.pipe_file(f"{path}/{name}", save(part))
        where.update(dict.fromkeys(part, name))
    text = json.dumps({"weight_map": where}).encode()
    fs.pipe_file(f"{path}/model.safetensors.index.json", text)
    yield root
    fs.rm(path, recursive=True)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))


def test_a_checkpoint_at_a_url_is_read_by_ranges(tiny, url, monkeypatch):
    held = weights(tiny)
    monkeypatch.setattr("rollout.loader.remote.RANGE", 1000)  # several at once
    with open_checkpoint(url) as checkpoint:
        lazy = dict(checkpoint.items())
        assert lazy.keys() == held.keys()
        for name, value in held.items():
            shape = tuple(value.shape)
            assert torch.equal(lazy[name].read(Box.full(shape)), value)
        before = checkpoint.bytes_read
        part = lazy["model.embed_tokens.weight"].read(Box((10, 8), (20, 40)))
        assert torch.equal(part, held["model.embed_tokens.weight"][10:20, 8:40])
        assert checkpoint.bytes_read == before + 10 * 32 * 4
    with Rollout(str(tiny), **CPU) as r:
        want = said(r), r.chat([{"role": "user", "content": "hi"}], GREEDY)[0].outputs
    with Rollout(url, **CPU) as r:  # config and tokenizer come from there, too
        assert (said(r), r.chat([{"role": "user", "content": "hi"}], GREEDY)[0].outputs) == want


def test_a_whole_file_at_a_url_goes_before_an_index_that_an_earlier_save_has_left(url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/model.safetensors", save({"only": torch.ones(3)}))
    with open_checkpoint(url) as checkpoint:
        assert [meta.name for meta in checkpoint.metadata()] == ["only"]


def test_further_chat_templates_come_with_a_tokenizer_and_stay_beside_saved_weights(url, tmp_path):
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/additional_chat_templates/tool_use.jinja", b"{{ tools[0].name }}")
    fs.pipe_file(f"{root}/chat_template.jinja", b"{{ messages[0].content }}")
    with Rollout(url, **CPU) as r:
        r.save_sharded_state(tmp_path / "state")
    for where in (resolve_model(url), tmp_path / "state"):
        found = Tokenizer.load(str(where))
        assert found is not None
        tools = ChatOptions(tools=({"name": "look"},))
        messages = [{"role": "user", "content": "hi"}]
        assert (found.render_chat(messages), found.render_chat(messages, tools)) == ("hi", "look")


def test_what_is_wrong_at_a_url_is_named(url):
    fs, root = fsspec.core.url_to_fs(url)
    with pytest.raises(ConfigError, match="nosuch://x/y cannot be opened"):
        open_checkpoint("nosuch://x/y")
    with pytest.raises(ConfigError, match="cannot be listed"):
        Rollout(url + "/nowhere", **CPU)
    whole = fs.cat_file(f"{root}/model-0.safetensors")
    fs.pipe_file(f"{root}/model-0.safetensors", whole[:-4])
    with pytest.raises(ConfigError, match=r"model-0\.safetensors is truncated .*ends within"):
        open_checkpoint(url)
    fs.pipe_file(f"{root}/model-0.safetensors", b"\xff" * 64)
    with pytest.raises(ConfigError, match="truncated or no safetensors file"):
        open_checkpoint(url)
    fs.rm_file(f"{root}/model-0.safetensors")
    with pytest.raises(ConfigError, match="is in none of the files"):
        open_checkpoint(url)


def test_a_file_that_ends_while_it_is_read_is_an_error(url):
    fs, root = fsspec.core.url_to_fs(url)
    reader = RemoteReader(fs, f"{root}/model-1.safetensors")
    with pytest.raises(ConfigError, match="ends within x"):
        reader.read("x", 10**9, torch.float32, (4,), Box((0,), (4,)))


@pytest.mark.parametrize("sizes", [(1,), pytest.param((2,), marks=pytest.mark.more)])
def test_a_registered_loader_serves_in_this_process_and_in_ranks_of_their_own(
    tiny, monkeypatch, sizes
):
    """Ranks import it by its module; they know nothing of this program's registry."""
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    from loader.loaders import doubled

    assert find_loader("doubled") is doubled
    assert portable("doubled") == "loader.loaders:doubled"
    assert portable("safetensors") == "safetensors"
    want = {name: value * 2 for name, value in weights(tiny).items()}
    for size in sizes:
        with Rollout(str(tiny), load_format="doubled", tensor_parallel_size=size, **CPU) as r:
            assert r.check_weights(want).equal


@pytest.mark.skipif(find_spec("fastsafetensors") is not None, reason="it is there")
def test_fastsafetensors_that_is_not_installed_is_named(tiny):
    with pytest.raises(ConfigError, match="pip install fastsafetensors, or use load_format='saf"):
        Rollout(str(tiny), load_format="fastsafetensors", **CPU)


@pytest.mark.skipif(find_spec("fastsafetensors") is None, reason="needs fastsafetensors")
def test_fastsafetensors_reads_what_safetensors_does(tiny, tmp_path):
    """Of files in two shards; every rank its boxes."""
    held = list(weights(tiny).items())
    for number in range(2):
        save_file(dict(held[number::2]), tmp_path / f"model-{number}.safetensors")
    shutil.copyfile(tiny / "config.json", tmp_path / "config.json")
    with open_checkpoint(str(tmp_path), load_format="fastsafetensors") as checkpoint:
        for name, lazy in checkpoint.items():
            box = Box((1,) * len(lazy.shape), lazy.shape)
            assert torch.equal(lazy.read(box), dict(held)[name][box.slices])
    for ranks in (1, 2):
        settings = {"load_format": "fastsafetensors", "tensor_parallel_size": ranks}
        with Rollout(str(tmp_path), **settings, **CPU) as r:
            assert r.check_weights(dict(held)).equal


def test_what_is_no_loader_is_refused_by_name(tiny):
    for name, match in (
        ("nope", "Load format `nope` is not supported; use one of auto, .*dummy, "),
        ("nowhere_at_all:f", "cannot import nowhere_at_all:f"),
    ):
        with pytest.raises(ConfigError, match=match):
            Rollout(str(tiny), load_format=name, **CPU)
    with pytest.raises(ConfigError, match="'safetensors' is rollout"):
        register_loader("safetensors")(lambda request: request)
    name = uuid.uuid4().hex
    register_loader(name)(lambda request: request)
    with pytest.raises(ConfigError, match="returned a LoadRequest; it has to return"):
        open_checkpoint(str(tiny), load_format=name)
    assert isinstance(LoadRequest(location="x").directory, Path)


def test_made_up_weights_then_an_update_are_the_trainers_model(tiny, other):
    """How RL starts: no weight file is read, and the first update brings all."""
    model, want = other
    with Rollout(str(tiny), load_format="dummy", **CPU) as r:
        assert not r.check_weights(model).equal
        r.update_weights(model)
        assert said(r) == want


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.more)])
def test_the_log_says_what_each_rank_read_and_how_long_it_took(tiny, caplog, size):
    with (
        caplog.at_level(logging.INFO, "rollout"),
        Rollout(str(tiny), tensor_parallel_size=size, **CPU),
    ):
        pass
    lines = [text for text in caplog.messages if " read " in text and "of weights" in text]
    assert [line.split(" read")[0] for line in lines] == [f"rank {rank}" for rank in range(size)]


PEAK = """
import sys, threading
import torch
from rollout.distributed import TensorParallel
from rollout.loader import open_checkpoint
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig

def own():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10

path, size = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
config = ModelConfig.from_directory(path)
build_model(config, TensorParallel(0, size), torch.bfloat16, "meta")  # what is imported late
done, peak = threading.Event(), [0]
def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], own())
before = own()
thread = threading.Thread(target=watch); thread.start()
model = build_model(config, TensorParallel(0, size), torch.bfloat16, "cpu")
with open_checkpoint(path) as checkpoint:
    model.load_weights(checkpoint.items())
done.set(); thread.join()
held = sum(p.numel() * p.element_size() for p in model.parameters())
print(peak[0] - before, held, checkpoint.bytes_read)
"""


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_load_takes_no_more_memory_than_the_weights(tmp_path, size):
    """Nor more of the file than this rank's part: values go from the page cache to their place."""
    write_tiny(
        tmp_path, "qwen3", dtype=torch.bfloat16, hidden_size=512, intermediate_size=2048,
        num_layers=8, vocab_size=8192, tied=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), str(size)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    peak, held, read = map(int, done.stdout.split())
    assert held > 20 << 20
    assert read <= held  # an odd vocabulary is padded
    assert peak < 1.15 * held + (4 << 20)
