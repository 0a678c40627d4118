"""Dense architectures beside Llama and Qwen: logits and tokens against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import Session, loaded, prompts, reference, run_ranks
from safetensors import safe_open
from tiny_models import DENSE, write_tiny
from torch import Tensor

from rollout.cli.main import main
from rollout.distributed import TensorParallel
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import check_tables

SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"vocab_size": 317, "num_key_value_heads": 4, "intermediate_size": 84},
    "key heads replicated over four ranks": {"num_attention_heads": 8},
}
ROWS = [29, 6, 43]  # beyond the window of seven
# Windows that the files of other releases of these have: in all layers, or from the second on.
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 7},
    "qwen2": {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
}


def head_dim(arch: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Several take theirs from the hidden size alone."""
    hidden = 16 * shape.get("num_attention_heads", 4)
    return {"hidden_size": hidden, **shape}


@pytest.mark.parametrize(
    "shape", ["odd", pytest.param("key heads replicated over four ranks", marks=pytest.mark.more)]
)
@pytest.mark.parametrize("arch", DENSE)
def test_logits_equal_those_of_transformers_at_every_parallel_size(
    tmp_path: Path, arch: str, shape: str
) -> None:
    check_logits(tmp_path, arch, head_dim(arch, SHAPES[shape]))


@pytest.mark.parametrize("arch", WINDOWS)
def test_windows_that_a_file_asks_for_act_at_every_parallel_size(tmp_path: Path, arch: str) -> None:
    shape = {**SHAPES["odd"], **WINDOWS[arch]}
    check_logits(tmp_path, arch, shape)
    windows = [layer.window for layer in ModelConfig.from_directory(tmp_path).layers]
    assert windows == [7 if arch == "mistral" else 0, 7]
    told, untold = (
        reference(write_tiny(tmp_path, arch, **{**shape, "sliding_window": window}), [ids])[0]
        for window in (7, 4096)
        for ids in prompts(317, ROWS[:1])
    )
    assert torch.equal(told[:7], untold[:7])
    assert (told[7:] - untold[7:]).abs().amax(-1).min() > 1e-2  # the bound above is 1e-4


@pytest.mark.parametrize(("original", "longest"), [(64, 64), (4, 512)], ids=["short", "long"])
def test_longrope_is_that_of_transformers_where_both_choose_alike(
    tmp_path: Path, original: int, longest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ``check`` says where they do not."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.5, 2.0, 4.0, 8.0],
    }
    shape = {"rope_parameters": rope, "original_max_position_embeddings": original}
    check_logits(tmp_path, "phi3", shape, longest)
    settings = ["--device", "cpu", "--dtype", "float32", "--max-model-len"]
    said = []
    for length in (longest, 512):
        assert main(["check", str(tmp_path), *settings, str(length)]) == 0
        said.append(
            f"--max-model-len {original} serves those as it does" in capsys.readouterr().out
        )
    assert said == [longest > original, True]
    config, [ids] = ModelConfig.from_directory(tmp_path), prompts(320, [3])  # below both
    source = write_tiny(tmp_path, "phi3", **shape)
    model = loaded(config, TensorParallel(), source.state_dict(), max_model_len=512)
    [ours], [theirs] = Session(model, [ids]).advance([3]), reference(source, [ids])
    assert (ours - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["longrope", "yarn"])
def test_longrope_of_phi_3_goes_by_both_names_and_without_its_original_length(
    tmp_path: Path, name: str
) -> None:
    rope = {"short_factor": [1.0, 1.3, 1.6, 1.9], "long_factor": [2.0] * 4, "factor": 8.0}
    source = write_tiny(tmp_path, "phi3", rope_parameters={"rope_type": "longrope", **rope})
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"]
    values.pop("original_max_position_embeddings", None)
    values |= {"rope_scaling": {"type": name, **rope}, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(values | {"partial_rotary_factor": 0.5}))
    config, [ids] = ModelConfig.from_directory(tmp_path), prompts(320, [29])
    theirs = type(source).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = loaded(config, TensorParallel(), source.state_dict())
    [ours], [wanted] = Session(model, [ids]).advance([29]), reference(theirs, [ids])
    assert (ours - wanted).abs().max() < 1e-4


def check_logits(
    path: Path, arch: str, shape: dict[str, Any], max_model_len: int | None = None
) -> None:
    """Those of transformers at 1, 2 and 4 ranks, in both layouts, in three steps."""
    source = write_tiny(path, arch, **shape)
    config = ModelConfig.from_directory(path)
    weights, sequences = source.state_dict(), prompts(config.vocab_size, ROWS)
    wanted = reference(source, sequences)

    def work(tp: TensorParallel) -> list[list[Tensor]]:
        results = []
        for layout in ("plain", "tiles"):
            session = Session(
                loaded(config, tp, weights, layout=layout, max_model_len=max_model_len), sequences
            )
            got: list[list[Tensor]] = [[] for _ in sequences]
            for step in ([20, 3, 11], [8, 2, 31], [1, 1, 1]):
                for rows, part in zip(got, session.advance(step), strict=True):
                    rows.append(part)
            results.append([torch.cat(rows) for rows in got])
        return results

    for size in (1, 2, 4):
        for rank_results in run_ranks(size, work):
            for got in rank_results:
                for ours, theirs in zip(got, wanted, strict=True):
                    mine, other = ours.log_softmax(-1), theirs.log_softmax(-1)
                    assert (mine - other).abs().max() < 1e-4, f"{arch} at {size}"
                    top = theirs.topk(2).values
                    clear = top[:, 0] - top[:, 1] > 1e-3
                    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
                    assert clear.float().mean() > 0.9


@pytest.mark.parametrize("arch", DENSE)
def test_every_name_of_the_files_and_the_modules_has_its_place(tmp_path: Path, arch: str) -> None:
    """Whole at every parallel size; what transformers' module names in memory is known, too."""
    source = write_tiny(tmp_path, arch, num_attention_heads=8, hidden_size=128, tied=True)
    config = ModelConfig.from_directory(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    for size in (1, 2, 4):
        tables = build_tables(config, size)
        check_tables(tables)
        assert set(tables[0].slots) == names
    held = {name for name, _ in source.named_parameters()}
    names |= {*tables[0].spellings.names()}
    assert held <= names
    assert set(source.state_dict()) - names <= set(tables[0].aliases)
