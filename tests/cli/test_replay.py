"""A journal of requests, and running one of them again."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapted_models import adapted
from safetensors.torch import load_file, save_file
from shared_engines import eventually
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.api.diagnosing.diagnosis import diagnose
from rollout.api.diagnosing.replay import _params, replay
from rollout.cli.main import main
from rollout.engine.requests.journal import (
    KEPT_VERSIONS,
    Finished,
    Journal,
    journal_files,
    read_journal,
)
from rollout.errors import ConfigError
from rollout.generation import VersionSpan
from rollout.kernels import silu_mul
from rollout.kernels.silu_mul import cpu

PROMPT = [3, 1, 4, 1, 5]
LONG = [*range(3, 103)] * 4
DRAWN = SamplingParams(n=2, max_tokens=12, temperature=0.9, top_p=0.95, ignore_eos=True)


@pytest.fixture(scope="module")
def journaled(tmp_path_factory):
    """A journal with a request of two samples drawn without a seed, one of version 1, and ids."""
    where = tmp_path_factory.mktemp("journal")
    model = write_tiny(where / "tiny", "qwen3", seed=1)
    weights = {name: value + 0.01 for name, value in model.state_dict().items()}
    with Rollout(
        where / "tiny", device="cpu", num_threads=1, skip_tokenizer_init=True,
        deterministic=True, journal=str(where / "journal"),
    ) as engine:  # fmt: skip
        [first] = engine.generate(PROMPT, DRAWN)
        engine.update_weights(weights)
        [second] = engine.generate(PROMPT, DRAWN)
    return where, first, second


def test_a_replay_gives_the_same_tokens_bit_for_bit_though_no_seed_was_given(journaled, capsys):
    where, first, _ = journaled
    assert main(["replay", first.request_id, "--journal", str(where / "journal")]) == 0
    said = capsys.readouterr().out
    assert "weights: those of version 0" in said
    assert "settings: the same" in said
    assert said.count("12 of 12 tokens again: bit for bit") == 2
    assert main(["replay", "--journal", str(where / "journal")]) == 0
    listed = capsys.readouterr().out
    assert first.request_id in listed
    assert "12+12" in listed


def test_what_ranks_on_ray_have_drawn_is_run_again_without_a_cluster(journaled, tmp_path):
    where, first, _ = journaled
    found = next(read_journal(where / "journal"))
    on_ray = {"executor": "ray", "ray_address": "192.0.2.1:6379", "ray_placement_group": "mine"}
    journal = Journal(tmp_path / "ray", 1 << 20)
    journal.start({**found.facts, "settings": {**found.facts["settings"], **on_ray}})
    journal.add(Finished(_Again(first), DRAWN, found.seeds, 0))
    journal.close()
    report = replay(tmp_path / "ray", first.request_id)
    assert report.same
    assert report.settings == ()


def test_other_weights_and_settings_are_named_where_tokens_differ(journaled, capsys, tmp_path):
    where, first, second = journaled
    report = replay(where / "journal", second.request_id)  # the checkpoint is version 0
    assert not report.same
    assert "differ from version 1's" in report.weights
    changed = tmp_path / "changed"
    shutil.copytree(where / "tiny", changed)
    weights = load_file(changed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * 3
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    report = replay(where / "journal", first.request_id, checkpoint=changed, deterministic=False)
    assert report.differing == (name,)
    assert any(line.startswith("deterministic: True then, False now") for line in report.settings)
    assert not report.same
    said = "\n".join(report.lines())
    assert "because: the weights are others" in said
    assert "first in layers.1.mlp.down_proj: give the checkpoint" in said
    with pytest.raises(ConfigError, match="no request 'nobody'"):
        replay(where / "journal", "nobody")
    assert main(["replay", "x"]) == 2
    assert "--journal DIR" in capsys.readouterr().err


def test_tokens_of_a_prompt_that_other_weights_computed_in_part_are_not_run_again(
    journaled, tmp_path, capsys
):
    """An update and its rollback came while the prompt was computed: its middle is of others."""
    model, journal = str(journaled[0] / "tiny"), str(tmp_path / "journal")
    files = load_file(f"{model}/model.safetensors")
    weights = {name: value + 0.01 for name, value in files.items()}
    with Rollout(
        model, device="cpu", num_threads=1, skip_tokenizer_init=True, deterministic=True,
        journal=journal, max_num_batched_tokens=2, async_scheduling=False,
    ) as engine:  # fmt: skip
        for _ in range(20):
            asked = engine.stream(LONG, SamplingParams(max_tokens=4, ignore_eos=True))
            reader = ThreadPoolExecutor(1).submit(lambda asked=asked: list(asked)[-1])
            eventually(lambda: engine.metrics().running == 1, 20)
            engine.update_weights(weights)
            engine.rollback()
            output = reader.result(20)
            [sample] = output.outputs
            if len(sample.kv_spans) == 3 and len(sample.weight_versions) == 1:
                break
    assert len(sample.kv_spans) == 3
    assert main(["replay", output.request_id, "--journal", journal]) == 1
    said = capsys.readouterr().out
    assert "sample 0: none of 4 tokens was run again" in said
    assert "because: what versions with other weights computed" in said
    assert "report" not in said


def test_a_context_that_was_computed_again_is_named_where_its_tokens_do_not_come_again(
    journaled, tmp_path
):
    """A rollback came while the prompt was computed, and its KV was dropped after the first token:
    of what that token saw nothing is left.
    """
    model, journal = str(journaled[0] / "tiny"), str(tmp_path / "journal")
    files = load_file(f"{model}/model.safetensors")
    with Rollout(
        model, device="cpu", num_threads=1, skip_tokenizer_init=True, deterministic=True,
        journal=journal, max_num_batched_tokens=2, async_scheduling=False,
    ) as engine:  # fmt: skip

        def read():
            for output in engine.stream(LONG, SamplingParams(max_tokens=40, ignore_eos=True)):
                if len(output.outputs[0].token_ids) == 1:
                    engine.reset_prefix_cache(reset_running_requests=True)
            return output

        for _ in range(20):
            engine.update_weights({name: value * 3 + 0.5 for name, value in files.items()})
            reader = ThreadPoolExecutor(1).submit(read)
            eventually(lambda: engine.metrics().running == 1, 20)
            version = engine.rollback().version
            output = reader.result(20)
            [sample] = output.outputs
            # All of it by the version that is live: the reset may have come behind the last token.
            spans = {span.version for span in (*sample.weight_versions, *sample.kv_spans)}
            if spans == {version}:
                break
    assert spans == {version}
    report = replay(journal, output.request_id)
    assert not report.same
    assert "because: weights, settings and kernels are the same: if its KV was computed again" in (
        "\n".join(report.lines())
    )


def test_a_kernel_that_computes_something_else_is_named_with_its_token_and_layer(
    journaled, capsys, monkeypatch, tmp_path
):
    where, first, _ = journaled
    honest = cpu.silu_mul
    monkeypatch.setattr(cpu, "silu_mul", lambda x: honest(x) * 1.5)
    monkeypatch.setattr(silu_mul, "_by_device", {})  # what it found before
    journal, tiny = str(where / "journal"), str(where / "tiny")
    assert main(["replay", first.request_id, "--journal", journal, "--checkpoint", tiny]) == 1
    said = capsys.readouterr().out
    assert "weights: those of version 0" in said
    assert re.search(r"sample 0: token \d+ differs: \d+ then, \d+ now \(logprob of \d+: -", said)
    assert "layer: mlp at layers.0.mlp differs from transformers' by" in said
    assert "kernel: silu_mul, whose plain-torch reference in its place agrees" in said
    assert "because: what a layer computes here is not what its weights say" in said
    unknown = tmp_path / "unknown"  # to transformers, which wants a model_type
    shutil.copytree(tiny, unknown)
    config = json.loads((unknown / "config.json").read_text())
    del config["model_type"]
    (unknown / "config.json").write_text(json.dumps(config))
    report = replay(journal, first.request_id, checkpoint=unknown)
    assert not report.same
    assert report.layers[0].startswith("layers: not compared: ValueError: Unrecognized model")
    monkeypatch.setattr(cpu, "silu_mul", lambda x: honest(x) * float("nan"))
    monkeypatch.setattr(silu_mul, "_by_device", {})
    report = replay(journal, first.request_id, checkpoint=tiny)  # here no token has a logprob
    assert report.samples[0].first_difference == (0, first.outputs[0].token_ids[0], None)
    assert report.layers[0].startswith("layer: mlp at layers.0.mlp differs")


def test_what_an_engine_replaced_in_the_config_and_its_dtype_are_those_of_a_replay(
    tmp_path, monkeypatch
):
    """The checkpoint of a later step has neither; layers are compared, diagnosed, with both."""
    model = write_tiny(tmp_path / "tiny", "qwen3", seed=1, dtype=torch.bfloat16)
    engine = {"device": "cpu", "num_threads": 1, "skip_tokenizer_init": True, "seed": 3}
    engine["weight_layout"] = "plain"  # blocks run op by op, so that one can be made wrong
    journal = str(tmp_path / "journal")
    with Rollout(tmp_path / "tiny", **engine) as plain:
        [unlike] = plain.generate(PROMPT, DRAWN)
    rope = {"rope_parameters": {"rope_theta": 2.0}}
    with Rollout(
        tmp_path / "tiny", hf_overrides=rope, head_dtype="float32", journal=journal, **engine
    ) as changed:
        [first] = changed.generate(PROMPT, DRAWN)
        asked = {"sequences": 1, "params": SamplingParams(max_tokens=8)}
        with Rollout.connect(changed.address) as far:
            found = diagnose(far, tmp_path / "tiny", **asked)
        assert (found.verdict.kind, found.verdict.name) == ("rope", "rotary_emb")
        model.config.rope_parameters["rope_theta"] = 2.0
        alike = type(model)(model.config).to(torch.bfloat16)
        alike.load_state_dict(model.state_dict())
        model.model.rotary_emb = alike.model.rotary_emb
        verdict = diagnose(changed, model, **asked).verdict
        assert (verdict.kind, verdict.name) == ("head", "lm_head")  # float32 there alone
    assert first.outputs[0].token_ids != unlike.outputs[0].token_ids
    wide = tmp_path / "wide"  # as a trainer saves it
    model.float().save_pretrained(wide)
    shutil.copy(tmp_path / "tiny" / "config.json", wide)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    report = replay(journal, first.request_id, checkpoint=wide)
    assert report.same, report.lines()
    assert report.settings == ()
    honest = cpu.silu_mul
    monkeypatch.setattr(cpu, "silu_mul", lambda x: honest(x) * 20)
    monkeypatch.setattr(silu_mul, "_by_device", {})
    report = replay(journal, first.request_id, checkpoint=wide)
    assert report.layers[0].startswith("layer: mlp at layers.0.mlp differs"), report.layers


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_a_request_with_an_adapter_is_replayed_with_its_version_of_it(tmp_path, capsys):
    write_tiny(tmp_path / "tiny", "qwen3", seed=1)
    for seed in (1, 2):
        adapted(tmp_path / "tiny", seed).save_pretrained(tmp_path / f"adapter{seed}")
    journal = str(tmp_path / "journal")
    with Rollout(
        tmp_path / "tiny", device="cpu", num_threads=1, skip_tokenizer_init=True, max_adapters=2,
        deterministic=True, journal=journal,
    ) as engine:  # fmt: skip
        for seed in (1, 2):
            engine.update_weights(adapters={"a": tmp_path / f"adapter{seed}"})
        params = {"max_tokens": 12, "ignore_eos": True, "adapter": "a"}
        [first] = engine.generate(PROMPT, params)
    assert first.outputs[0].adapter == "a@2"
    asked = ["replay", first.request_id, "--journal", journal]
    assert main([*asked, "--adapter", str(tmp_path / "adapter2")]) == 0
    said = capsys.readouterr().out
    assert "12 of 12 tokens again: bit for bit" in said
    assert "settings: the same" in said
    report = replay(journal, first.request_id, adapter=tmp_path / "adapter1")
    assert report.differing == ("adapter a@2",)
    assert "because: the adapter is another than" in report.lines()[-1]
    assert main(asked) == 2
    assert "had adapter a@2, whose factors the journal does not keep" in capsys.readouterr().err


def test_a_journal_stays_in_its_bound_reads_past_what_a_crash_cut_off_and_counts_drops(
    journaled, tmp_path
):
    first = journaled[1]
    directory = tmp_path / "bounded"
    journal = Journal(directory, 1 << 20)
    journal.start({"settings": {}})
    again = _Again(first)
    for _ in range(6000):
        journal.add(again.finished())
        if journal.dropped:
            break
    journal.close()
    assert journal.written + journal.dropped > 0
    files = journal_files(directory)
    assert 0 < sum(path.stat().st_size for path in files) <= (1 << 20) + (1 << 17)
    whole = sum(1 for _ in read_journal(directory))
    with files[-1].open("r+b") as file:
        file.truncate(files[-1].stat().st_size - 7)
    assert sum(1 for _ in read_journal(directory)) == whole - 1
    with pytest.raises(ConfigError, match="has no journal"):
        list(read_journal(Path(tmp_path)))
    with pytest.raises(ConfigError, match="journal_bytes"):
        Journal(directory, 1000)


def test_a_journal_that_begins_after_the_clock_was_set_back_is_the_newest(
    journaled, tmp_path, monkeypatch
):
    """Else its files would be the first to go, and those of the engine before it stay."""
    clock = time.time_ns
    for life, behind in enumerate((0, 3600 * 10**9)):
        monkeypatch.setattr(time, "time_ns", lambda behind=behind: clock() - behind)
        journal = Journal(tmp_path / "again", 1 << 20)
        journal.start({"life": life})
        journal.add(_Again(journaled[1]).finished())
        journal.close()
    assert [one.facts["life"] for one in read_journal(tmp_path / "again")] == [0, 1]


def test_versions_of_the_same_weights_are_told_of_once_in_a_file(journaled, tmp_path):
    """As those are that commits of adapters alone make."""
    directory = tmp_path / "alike"
    journal, first = Journal(directory, 1 << 20), journaled[1]
    journal.start({"settings": {}})
    for version, digests in ((4, {"w": 7}), (5, {"w": 7}), (6, {"w": 8})):
        journal.version(version, digests)
        spans = (VersionSpan(version, 0, 12),)
        outputs = [replace(one, weight_versions=spans, kv_spans=spans) for one in first.outputs]
        journal.add(_Again(replace(first, outputs=outputs)).finished())
    journal.close()
    found = [one.digests for one in read_journal(directory)]
    assert found == [{4: {"w": 7}}, {5: {"w": 7}}, {6: {"w": 8}}]
    text = journal_files(directory)[0].read_text()
    assert text.count('"digests"') == 2


def test_the_digest_of_an_adapter_that_is_live_is_kept_through_updates_of_others(
    journaled, tmp_path
):
    journal, first = Journal(tmp_path / "adapters", 1 << 20), journaled[1]
    journal.start({"settings": {}})
    for version in range(KEPT_VERSIONS):
        journal.version(version, {}, {"a@1": 5, f"b@{version}": version})
    outputs = [replace(one, adapter="a@1") for one in first.outputs]
    journal.add(_Again(replace(first, outputs=outputs)).finished())
    journal.close()
    [found] = read_journal(tmp_path / "adapters")
    assert (found.adapter, found.adapter_digest) == ("a@1", 5)


def test_a_journal_goes_on_once_the_disk_takes_it_again(journaled, tmp_path, monkeypatch):
    journal, again = Journal(tmp_path / "full", 1 << 20), _Again(journaled[1])
    full, honest = threading.Event(), os.fdatasync

    def sync(file: int) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        honest(file)

    def settled(count: int) -> None:
        deadline = time.monotonic() + 30
        while journal.written + journal.dropped < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(os, "fdatasync", sync)
    journal.start({"settings": {}})
    full.set()
    journal.add(again.finished())
    settled(1)
    assert journal.dropped == 1
    full.clear()
    wrote = os.write
    torn = iter((True,))

    def half(file: int, data: memoryview) -> int:
        if next(torn, False):
            wrote(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return wrote(file, data)

    monkeypatch.setattr(os, "write", half)
    for count in (2, 3, 4):
        journal.add(again.finished())
        settled(count)
    journal.close()
    assert (journal.written, journal.dropped) == (2, 2)
    assert all(found.facts["kind"] == "engine" for found in read_journal(tmp_path / "full"))


def test_a_full_disk_is_left_no_file_for_each_request(journaled, tmp_path, monkeypatch):
    journal, again = Journal(tmp_path / "full", 1 << 20), _Again(journaled[1])
    wrote, full = os.write, threading.Event()

    def write(file: int, data: memoryview) -> int:
        if full.is_set():
            raise OSError(28, "No space left on device")
        return wrote(file, data)

    monkeypatch.setattr(os, "write", write)
    full.set()
    journal.start({"settings": {}})
    for _ in range(5):
        journal.add(again.finished())
    deadline = time.monotonic() + 30
    while journal.dropped < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert journal_files(tmp_path / "full") == []
    full.clear()
    journal.add(again.finished())
    journal.close()
    assert len(journal_files(tmp_path / "full")) == 1
    assert (journal.written, journal.dropped) == (1, 5)


class _Again:
    """A finished request, as often as wanted."""

    def __init__(self, output) -> None:
        self._output = output

    def output(self):
        return self._output

    def finished(self):
        return Finished(self, DRAWN, (1, 2), 0)


def test_a_request_that_told_its_experts_is_replayed_with_them():
    experts = np.zeros((4, 1, 2), np.int16)
    params = SamplingParams(prompt_logprobs=1, routed_experts=experts)
    again = _params(SimpleNamespace(params=params, seeds=[7]), 0, 2)
    assert (again.routed_experts, again.prompt_logprobs) == (params.routed_experts, 0)


def test_what_drew_no_token_is_not_called_the_same(tmp_path):
    model = tmp_path / "tiny"
    write_tiny(model, "qwen3", seed=1)
    journal = tmp_path / "journal" / "replica-0"
    with Rollout(
        model, device="cpu", num_threads=1, skip_tokenizer_init=True, journal=str(journal),
        max_adapters=1, max_cpu_loras=2,
    ) as engine:  # fmt: skip
        engine.generate(PROMPT, SamplingParams(max_tokens=1), request_ids=["drew-one"])
        engine.embed([PROMPT], request_ids=["drew-none"])
    assert replay(journal, "drew-one").settings == ()
    with pytest.raises(ConfigError, match="'drew-none' drew no token"):
        replay(journal, "drew-none")
    with pytest.raises(ConfigError, match=r"holds those of replicas: .*replica-0"):
        list(read_journal(journal.parent))
    with pytest.raises(ConfigError, match="deterministic must be True or False, got 'no'"):
        Rollout(model, deterministic="no")
