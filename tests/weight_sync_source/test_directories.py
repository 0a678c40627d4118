"""A directory is a directory: an update, a check and a cold start read the same files of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import save as save_parts

from rollout.errors import IncompleteUpdate, SourceFailed
from rollout.loader import open_checkpoint
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weight_sync.versions.directories import check_checkpoint
from rollout.weights import Box
from rollout.weights.wanted import WantedWeights

State = dict[str, Tensor]


def halves(state: State) -> tuple[State, State]:
    names = sorted(state)
    return {n: state[n] for n in names[:2]}, {n: state[n] for n in names[2:]}


def mistral(where: Path, state: State) -> None:
    """Both formats side by side, as Mistral's repositories have them."""
    indexed(where, state)
    save_file({f"layers.{name}": tensor for name, tensor in state.items()},
              where / "consolidated.safetensors")  # fmt: skip


def indexed(where: Path, state: State) -> None:
    files = {}
    for turn, part in enumerate(halves(state)):
        file = f"model-{turn + 1:05d}-of-00002.safetensors"
        save_file(part, where / file)
        files.update(dict.fromkeys(part, file))
    (where / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def stray(where: Path, state: State) -> None:
    """A shard of an earlier save, which the index does not name."""
    indexed(where, state)
    save_file({name: tensor + 1 for name, tensor in state.items()},
              where / "model-00003-of-00003.safetensors")  # fmt: skip


def trainer_bin(where: Path, state: State) -> None:
    """What a Trainer leaves with save_safetensors=False."""
    torch.save(state, where / "pytorch_model.bin")
    torch.save(slice(1, 2), where / "training_args.bin")
    torch.save({"state": {0: torch.ones(3)}}, where / "optimizer.pt")
    torch.save({"step": 3}, where / "scheduler.pt")


def sharded_bin(where: Path, state: State) -> None:
    files = {}
    for turn, part in enumerate(halves(state)):
        file = f"pytorch_model-{turn + 1:05d}-of-00002.bin"
        torch.save(part, where / file)
        files.update(dict.fromkeys(part, file))
    (where / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


def legacy_bin(where: Path, state: State) -> None:
    torch.save(state, where / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def pt(where: Path, state: State) -> None:
    torch.save(state, where / "model.pt")


def consolidated(where: Path, state: State) -> None:
    save_file(state, where / "consolidated.safetensors")


@pytest.fixture
def state() -> State:
    torch.manual_seed(3)
    names = ("model.a.weight", "model.b.bias", "model.c.weight", "model.norm.weight")
    return {name: torch.randn(3, 5) for name in names}


@pytest.mark.parametrize(
    "write", [mistral, stray, trainer_bin, sharded_bin, legacy_bin, pt, consolidated]
)
def test_an_update_reads_what_a_cold_start_reads(
    write: Callable[[Path, State], None], state: State, tmp_path: Path
) -> None:
    write(tmp_path, state)
    (tmp_path / "config.json").write_text("{}")
    source = detect(tmp_path).source(WantedWeights(dtype=torch.float32))
    sent = {name: tensor.clone() for name, tensor in source}
    assert [meta.name for meta in source.metadata() or ()] == list(sent)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        read = {name: lazy.read(Box.full(lazy.shape)).clone() for name, lazy in checkpoint.items()}
    assert sent.keys() == read.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(sent[name], tensor), name
        assert torch.equal(read[name], tensor), name
    check_checkpoint(tmp_path)  # and following it would read these


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("pytorch_model.bin", b"\x80\x02no pickle of ours"),
        ("pytorch_model.bin", b"PK\x03\x04half an archive"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0garbage"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-9.safetensors"}}'),
        ("training_args.bin", b"anything"),
    ],
)
def test_a_file_of_no_use_is_named(tmp_path: Path, file: str, data: bytes) -> None:
    (tmp_path / file).write_bytes(data)
    named = file if file != "training_args.bin" else r"holds no .*safetensors"
    with pytest.raises(SourceFailed, match=named):
        detect(tmp_path).source(WantedWeights(dtype=torch.float32))


def by_torch(where: Path, state: State) -> None:
    save_parts(state, checkpoint_id=where, no_dist=True)


def by_torch_below(where: Path, state: State) -> None:
    """As a Trainer has it, with FSDP's SHARDED_STATE_DICT."""
    by_torch(where / "pytorch_model_fsdp_0", state)


def by_deepspeed(where: Path, state: State) -> None:
    (where / "global_step3").mkdir()
    torch.save({"module": state}, where / "global_step3" / "mp_rank_00_model_states.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("write", "remedy"),
    [
        (by_torch, "save_pretrained"),
        (by_torch_below, "FULL_STATE_DICT"),
        (by_deepspeed, r"run the zero_to_fp32\.py"),
    ],
)
def test_of_files_with_ranks_own_parts_it_is_said_where_whole_weights_come_from(
    write: Callable[[Path, State], None], remedy: str, state: State, tmp_path: Path
) -> None:
    write(tmp_path, state)
    with pytest.raises(SourceFailed, match=f"{tmp_path} holds no .* own parts, .*{remedy}"):
        detect(tmp_path).source(WantedWeights(dtype=torch.float32))
    with pytest.raises(IncompleteUpdate, match=f"{tmp_path} has no .* own parts, .*{remedy}"):
        check_checkpoint(tmp_path)


def test_what_breaks_after_the_look_is_named_too(state: State, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    source = detect(tmp_path).source(WantedWeights(dtype=torch.float32))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SourceFailed, match=str(tmp_path)):
        list(source)


@pytest.mark.parametrize("how", ["in place", "another file", "before it is opened again"])
@pytest.mark.parametrize("write", [indexed, trainer_bin])
def test_files_that_are_written_while_they_are_read_are_named(
    write: Callable[[Path, State], None], how: str, state: State, tmp_path: Path
) -> None:
    """A trainer saves over a checkpoint that is read: no mixture of the two passes for weights."""
    write(tmp_path, state)
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))  # some file systems tell no two times apart within milliseconds
    later = tmp_path / "later"
    later.mkdir()
    write(later, {name: tensor + 1 for name, tensor in state.items()})
    source = detect(tmp_path).source(WantedWeights(dtype=torch.float32))
    sent = iter(source)
    if how != "before it is opened again":
        next(sent)
    file = next(tmp_path.glob("*00002.safetensors"), tmp_path / "pytorch_model.bin")
    if how == "in place":
        file.write_bytes((later / file.name).read_bytes())
    else:
        (later / file.name).replace(file)
    with pytest.raises(SourceFailed, match=rf"{file} was written while it was read.*rename it"):
        list(sent)


def test_files_that_are_removed_while_they_are_read_are_read_to_their_end(
    state: State, tmp_path: Path
) -> None:
    """As by a Trainer that keeps its last checkpoints alone."""
    indexed(tmp_path, state)
    source = iter(detect(tmp_path).source(WantedWeights(dtype=torch.float32)))
    sent = dict([next(source)])
    for file in tmp_path.iterdir():
        file.unlink()
    sent |= {name: tensor.clone() for name, tensor in source}
    assert all(torch.equal(sent[name], tensor) for name, tensor in state.items())


def test_a_pickle_of_other_things_is_refused(tmp_path: Path, state: State) -> None:
    torch.save({**state, "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceFailed, match=r"pytorch_model\.bin is no state dict"):
        detect(tmp_path).source(WantedWeights(dtype=torch.float32))
    sparse = {**state, "model.a.weight": torch.eye(3).to_sparse()}
    torch.save(sparse, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceFailed, match=r"pytorch_model\.bin is no state dict of tensors"):
        detect(tmp_path).source(WantedWeights(dtype=torch.float32))
