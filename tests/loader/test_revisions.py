"""Model, tokenizer and code of hub ids, each at the revision that was asked for, from the cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_models import make_tokenizer, write_tiny

from rollout import EngineConfig, Rollout
from rollout.cli.main import main
from rollout.errors import ConfigError
from rollout.loader import resolve_model, resolve_tokenizer

CPU = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32, "dtype": "float32"}
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
TEXT = "The quick brown fox jumps over the lazy dog"
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({sentinel!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own-of-this-hub"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache in which folders are made for (id, revision)."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    commits = iter(range(100))

    def folder(name: str, revision: str) -> Path:
        repository = cache / f"models--{name.replace('/', '--')}"
        commit = f"{next(commits):040x}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        path = repository / "snapshots" / commit
        path.mkdir(parents=True)
        return path

    yield folder
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


def own(path: Path, prefix: str = "", **values: object) -> None:
    """Make a Llama one of the code that ``AUTO_MAP`` names."""
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own-of-this-hub", **values}
    config["auto_map"] = {part: f"{prefix}{name}" for part, name in AUTO_MAP.items()}
    (path / "config.json").write_text(json.dumps(config))


def ids_of(**settings: object) -> list[int]:
    with Rollout("some-org/tiny", load_format="dummy", **CPU, **settings) as r:
        return list(r.generate(TEXT, GREEDY)[0].prompt_token_ids)


def test_model_and_tokenizer_are_those_of_their_revisions(hub):
    sizes = {"main": 320, "v2": 300, "words": 280}
    for revision in ("main", "v2"):
        path = hub("some-org/tiny", revision)
        write_tiny(path, "llama", num_layers=1 if revision == "main" else 2)
        make_tokenizer(sizes[revision]).save_pretrained(path)
    for revision, size in (("main", 320), ("v3", sizes["words"])):
        make_tokenizer(size).save_pretrained(hub("some-org/words", revision))
    ids = {name: make_tokenizer(size)(TEXT)["input_ids"] for name, size in sizes.items()}
    assert len({tuple(each) for each in ids.values()}) == 3

    assert (
        json.loads((resolve_model("some-org/tiny", "v2") / "config.json").read_text())[
            "num_hidden_layers"
        ]
        == 2
    )
    assert ids_of() == ids["main"]
    assert ids_of(revision="v2") == ids["v2"]
    assert ids_of(tokenizer_revision="v2") == ids["v2"]
    words = {"tokenizer": "some-org/words", "tokenizer_revision": "v3"}
    assert ids_of(revision="v2", **words) == ids["words"]
    own_directory = str(resolve_tokenizer("some-org/words", "v3"))
    assert ids_of(tokenizer=own_directory, tokenizer_mode="slow") == ids["words"]


def test_code_is_that_of_its_revision_and_of_the_models_own_files(hub, tmp_path):
    for revision in ("main", "v2"):
        code = CODE.format(sentinel=str(tmp_path / f"ran_{revision}"))
        (hub("some-org/code", revision) / "own.py").write_text(code)
    path = hub("some-org/tiny", "main")
    write_tiny(path, "llama")
    own(path, "some-org/code--")
    trusted = {"trust_remote_code": True, **CPU}
    with Rollout("some-org/tiny", code_revision="v2", **trusted) as r:
        assert r.generate([1, 2, 3], GREEDY)
    assert (tmp_path / "ran_v2").exists()
    assert not (tmp_path / "ran_main").exists()

    own(path)  # which lies beside it, where it was fetched: another library fetched weights alone
    with pytest.raises(ConfigError, match=r"names own\.OwnForCausalLM, and there is no own\.py"):
        Rollout("some-org/tiny", **trusted)
    with pytest.raises(ConfigError, match="run with trust_remote_code=True"):
        Rollout("some-org/tiny", **CPU)
    (path / "own.py").write_text(CODE.format(sentinel=str(tmp_path / "ran_beside")))
    with Rollout("some-org/tiny", **trusted) as r:
        assert r.generate([1, 2, 3], GREEDY)
    assert (tmp_path / "ran_beside").exists()


def test_a_revision_that_would_be_ignored_is_refused(hub, tmp_path, capsys):
    path = tmp_path / "tiny"
    write_tiny(path, "llama", tokenizer=True)
    for settings, match in (
        ({"revision": "v2"}, r"revision='v2' is of a hub id, and .* is a directory: leave it out"),
        ({"tokenizer_revision": "v2"}, "tokenizer_revision='v2' is of a hub id"),
        (
            {"tokenizer": str(path), "tokenizer_revision": "v2"},
            "tokenizer_revision='v2' is of a hub id",
        ),
        ({"tokenizer": str(tmp_path)}, "has no tokenizer: none of tokenizer.json, tokenizer_conf"),
        ({"tokenizer": "some-org/words"}, "some-org/words: no such directory, not in the hub"),
    ):
        with pytest.raises(ConfigError, match=match):
            Rollout(str(path), **settings, **CPU)
    with pytest.raises(ConfigError, match="is of code that is run with trust_remote_code=True"):
        EngineConfig(model=str(path), code_revision="v2")
    with pytest.raises(ConfigError, match="and memory://b/m is a URL"):
        resolve_model("memory://b/m", "v2")
    assert main(["check", str(path), "--device", "cpu", "--revision", "v2"]) == 2
    assert "revision='v2' is of a hub id" in capsys.readouterr().err
