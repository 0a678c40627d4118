"""THE property for served adapters: a live update equals a start with them, bit for bit."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import adapted, shaken
from shared_engines import eventually, standing_still
from tiny_models import write_tiny
from trainer_processes import Job

from rollout import RequestOutput, Rollout, SamplingParams
from rollout.engine.updates.live_weights import live_weights
from rollout.errors import (
    ChecksumMismatch,
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    SourceFailed,
    TransferFailed,
    VersionConflict,
    WeightMismatch,
)
from rollout.generation import ContinuedPrompt
from rollout.models.adapters.model import AdapterModel
from rollout.weight_sync.protocol.committed import Committed, DeltaBase
from rollout.weight_sync.protocol.messages import UpdateRequest
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter
from rollout.weights import Box
from rollout.weights.adapters import AdapterSpec, ModuleSpec
from rollout.weights.components import POLICY

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.usefixtures("forked_ranks"),
]

PROMPTS = [list(range(3, 40)), list(range(50, 70))]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 8, "timeout": 30,
    "max_adapters": 4, "max_lora_rank": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "checkpoint"
    write_tiny(path, "qwen3", tied=True)
    return path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="tp1"),
        pytest.param({"tensor_parallel_size": 2}, id="tp2", marks=pytest.mark.more),
        pytest.param({"pipeline_parallel_size": 2}, id="pp2", marks=pytest.mark.soak),
    ],
)
def engine(request, base) -> Iterator[Rollout]:
    with Rollout(base, **request.param, **SETTINGS) as rollout:
        yield rollout


def over_another(model):
    """``model``, whose base is another one now; its factors are what they were."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.mul_(1.01)
    return model


def said(rollout: Rollout, adapter: str | None) -> Any:
    outputs = rollout.generate(PROMPTS, SamplingParams(adapter=adapter, **GREEDY))
    found = [output.outputs[0] for output in outputs]
    return [(one.token_ids, one.logprobs.raw, one.logprobs.processed) for one in found]


def stamped(output: RequestOutput) -> tuple[str, int]:
    """The adapter of a sample that one version computed, and that version."""
    one = output.outputs[0]
    [version] = {span.version for span in (*one.weight_versions, *one.kv_spans)}
    return one.adapter, version


def in_background(fn: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    return thread, found


def stamps(rollout: Rollout, adapter: str | None) -> tuple[str, set[int]]:
    [output] = rollout.generate([PROMPTS[0]], SamplingParams(adapter=adapter, **GREEDY))
    one = output.outputs[0]
    return one.adapter, {span.version for span in (*one.weight_versions, *one.kv_spans)}


def test_a_live_update_equals_a_start_with_the_adapter_of_its_directory(
    engine, base, tmp_path
) -> None:
    model = adapted(base, 1)
    before = said(engine, None)
    engine.update_weights(adapters={"math": shaken(model, 9)})
    receipt = engine.update_weights(adapters={"math": shaken(model, 1)})
    model.save_pretrained(tmp_path)
    version = engine.weight_version
    assert receipt.version == version == receipt.adapters["math"].version
    live = said(engine, "math")
    ranks = engine.weight_info().tensor_parallel_size
    with Rollout(base, tensor_parallel_size=ranks, **SETTINGS) as fresh:
        fresh.load_lora_adapter("math", tmp_path)
        assert said(fresh, "math") == live
        assert said(fresh, None) == before
        [at_start] = fresh.receipts()
    assert at_start.adapters["math"].digest == receipt.adapters["math"].digest
    assert live != before
    assert said(engine, None) == before
    assert stamps(engine, "math") == (f"math@{version}", {version})
    assert stamps(engine, None)[0] == ""
    assert engine.metrics().adapters["math"] == engine.weight_info().adapters["math"] == version


def test_updates_of_the_same_layout_bring_what_the_model_holds_each_time(
    engine, base, tmp_path
) -> None:
    model = adapted(base, 40)
    for seed in range(40, 46):  # every slot knows the layout by then
        engine.update_weights(adapters={"again": shaken(model, seed)})
    model.save_pretrained(tmp_path)
    engine.update_weights(adapters={"beside": tmp_path})
    assert said(engine, "again") == said(engine, "beside")
    assert engine.unload_lora_adapter("beside")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n)[0, 0] = torch.nan
    before = said(engine, "again")
    with pytest.raises(WeightMismatch, match=r"lora_B.weight \(1 elements\)"):
        engine.update_weights(adapters={"again": model})
    assert said(engine, "again") == before
    assert engine.unload_lora_adapter("again")


def test_an_update_moves_the_bytes_of_its_adapter_alone(engine, base) -> None:
    model = adapted(base, 2)
    size = sum(p.numel() * 4 for n, p in model.named_parameters() if "lora_" in n)
    weights = sum(meta.nbytes for meta in engine.weight_info().tensors)
    inline = engine.update_weights(model, adapters_only=True)
    with pytest.raises(ConfigError, match=r"would be merged into the base.*adapters_only=True"):
        engine.update_weights(model)
    with pytest.raises(ConfigError, match="adapters_only is True or False, got 'math'"):
        engine.update_weights(model, adapters_only="math")
    with Rollout.connect(engine.address) as remote:
        received = [
            remote.update_weights(shaken(model, 2), adapters_only=True, transport=transport)
            for transport in ("auto", "ipc", "grpc_stream", "broadcast")
        ]
    for receipt in (inline, *received):
        assert receipt.num_bytes == receipt.adapters["default"].num_bytes == size
        assert size <= receipt.wire_bytes < size + 4096 < weights / 4
        assert receipt.num_tensors == 2 * 3 * 2
        assert receipt.digest == inline.digest
    if engine.weight_info().num_ranks == 1:
        assert inline.details["read_in_place"] == f"{inline.num_tensors} tensors"
    assert engine.weight_info().adapters["default"] == received[-1].version
    assert engine.unload_lora_adapter("default")


def test_a_slot_of_a_larger_adapter_serves_a_smaller_one_as_a_new_slot_does(base) -> None:
    settings = {**SETTINGS, "max_adapters": 2}
    small = adapted(base, 5, r=2, target_modules=["q_proj"])
    with Rollout(base, **settings) as fresh:
        fresh.update_weights(adapters={"math": small})
        right = said(fresh, "math")
    with Rollout(base, **settings) as rollout:
        for seed in (3, 4):  # both slots
            rollout.update_weights(adapters={"math": adapted(base, seed, r=8)})
        for _ in range(2):
            rollout.update_weights(adapters={"math": small})
            assert said(rollout, "math") == right


@pytest.mark.more
def test_ranks_that_share_a_model_send_its_adapter_as_one_does(engine, base, tmp_path) -> None:
    """FSDP2: the factors are gathered, or go from where they lie; the base stays where it is."""
    transports = ("auto", "ipc", "grpc_stream", "broadcast", "p2p")
    alone = engine.update_weights(adapters={"math": adapted(base, 21)})
    wanted, plain = said(engine, "math"), said(engine, None)
    script = Path(__file__).parent / "adapter_job.py"
    job = Job(script, 2, tmp_path / "log", engine.address, str(base), *transports)
    try:
        answers = job.answers(120)
    finally:
        job.close()
    assert None not in answers, job.log.read_text()
    first, second = answers
    assert first == second
    *adapters, both = first
    assert len(adapters) == len(transports)
    for sent in adapters:
        assert sent["digest"] == alone.digest
        assert sent["adapters"]["math"]["num_bytes"] == alone.num_bytes
        assert sent["wire_bytes"] < 2 * alone.num_bytes
    assert both["adapters"]["math"]["digest"] == alone.digest
    assert (said(engine, "math"), said(engine, None)) == (wanted, plain)


def paused(rollout: Rollout, params: SamplingParams) -> Iterator[RequestOutput]:
    """The rest of a stream that has begun and stands still."""

    def begin() -> Iterator[RequestOutput]:
        stream = rollout.stream(PROMPTS[0], params)
        next(stream)
        return stream

    return standing_still(begin, rollout, running=1)


def test_a_stream_keeps_its_version_while_new_requests_get_the_new_one(engine, base) -> None:
    model = adapted(base, 3)
    first = engine.update_weights(adapters={"math": model}).version
    old = said(engine, "math")
    long = SamplingParams(adapter="math", temperature=0, max_tokens=60, ignore_eos=True)
    running = paused(engine, long)
    second = engine.update_weights(adapters={"math": shaken(model, 4)}).version
    engine.resume_generation()
    new = said(engine, "math")
    *_, last = running
    done = last.outputs[0]
    assert done.token_ids[:6] == old[0][0]
    assert (done.adapter, [span.version for span in done.weight_versions]) == (
        f"math@{first}",
        [first],
    )
    assert new != old
    assert stamps(engine, "math") == (f"math@{second}", {second})
    running = paused(engine, long)
    third = engine.update_weights(adapters={"math": shaken(model, 3)}, in_flight="recompute")
    engine.resume_generation()
    *_, last = running
    done = last.outputs[0]
    assert done.adapter == f"math@{third.version}"
    assert {s.version for s in done.weight_versions} == {second, third.version}
    assert said(engine, "math") == old


def test_a_failed_update_leaves_the_old_version_and_its_slot(engine, base) -> None:
    model = adapted(base, 5)
    engine.update_weights(adapters={"math": model})
    before, version = said(engine, "math"), engine.weight_version
    broken = adapted(base, 5)
    with torch.no_grad():
        next(p for n, p in broken.named_parameters() if "lora_B" in n).fill_(float("nan"))
    for _ in range(5):  # more often than there are slots
        with pytest.raises(WeightMismatch, match=r"NaN.*adapter/math:.*lora_B"):
            engine.update_weights(adapters={"math": broken})
    large = adapted(base, 5, r=9)
    for adapters, error, match in (
        ({"math": large}, ConfigError, "rank 9.* up to 8: .*max_lora_rank=9"),
        ({f"a{n}": model for n in range(5)}, ConfigError, "5 adapters come at once.*is 4"),
        ({f"a{n}": model for n in range(4)}, ConfigError, r"max_adapters=5 or more"),
    ):
        with pytest.raises(error, match=match):
            engine.update_weights(adapters=adapters)
    assert engine.weight_version == version
    assert said(engine, "math") == before


def test_a_slot_that_holds_other_scalings_than_were_sent_is_refused(base, monkeypatch) -> None:
    with Rollout(base, **SETTINGS) as rollout:
        receipt = rollout.update_weights(adapters={"math": adapted(base, 31)})
        before, loaded = said(rollout, "math"), AdapterModel.after_load

        def changed(model: AdapterModel) -> None:
            loaded(model)
            next(iter(model._adapted.values())).scales.mul_(1.0001)

        def left_over(model: AdapterModel) -> None:
            loaded(model)
            model._unused[0].scales.fill_(0.5)

        for fault in (changed, left_over):
            monkeypatch.setattr(AdapterModel, "after_load", fault)
            with pytest.raises(ChecksumMismatch, match=r"'math'.*scalings.*rank 0"):
                rollout.update_weights(adapters={"math": adapted(base, 32)})
            assert said(rollout, "math") == before
        monkeypatch.undo()
        assert rollout.weight_version == receipt.version
        rollout.update_weights(adapters={"math": adapted(base, 32)})
        assert said(rollout, "math") != before


def test_a_rollback_brings_the_version_before_back_under_its_own_name(engine, base) -> None:
    model = adapted(base, 6)
    first = engine.update_weights(adapters={"math": model}).version
    old = said(engine, "math")
    engine.update_weights(adapters={"math": shaken(model, 7), "code": model})
    assert said(engine, "math") == said(engine, "code") != old
    receipt = engine.rollback()
    assert receipt.adapters["math"].version == first
    assert said(engine, "math") == old
    assert stamps(engine, "math")[0] == f"math@{first}"
    with pytest.raises(InvalidRequest, match="no adapter 'code'"):
        said(engine, "code")
    with pytest.raises(VersionConflict, match="once after a commit"):
        engine.rollback()
    again = engine.update_weights(adapters={"math": shaken(model, 7)}).version
    assert stamps(engine, "math")[0] == f"math@{again}"


def test_base_and_adapter_change_at_one_commit_and_go_back_together(engine, base) -> None:
    first = adapted(base, 8)
    engine.update_weights(first, adapters={"math": first})
    old = said(engine, None), said(engine, "math")
    second = over_another(adapted(base, 10))
    receipt = engine.update_weights(second, adapters={"math": second})
    assert set(receipt.adapters) == {"math"}
    assert receipt.num_tensors == 2 * 3 * 2 + len(engine.weight_info().tensors)
    new = said(engine, None), said(engine, "math")
    assert new[0] != old[0]
    assert new[1] != old[1]
    assert stamps(engine, "math") == (f"math@{receipt.version}", {receipt.version})
    engine.rollback()
    assert (said(engine, None), said(engine, "math")) == old
    engine.update_weights(second, adapters={"math": second})
    assert (said(engine, None), said(engine, "math")) == new


def test_pins_last_beside_a_commit_of_adapters_alone_which_waits_for_none(engine, base) -> None:
    first, second = adapted(base, 14), over_another(adapted(base, 15))
    old = engine.update_weights(first, adapters={"math": first}).version
    long = SamplingParams(adapter="math", temperature=0, max_tokens=60, ignore_eos=True)
    alone = engine.generate([PROMPTS[0]], long)[0].outputs[0]
    for in_flight in ("pin", "recompute"):
        running = paused(engine, long)
        pinned = engine.update_weights(second, adapters={"math": second}, in_flight="pin")
        beside = engine.update_weights(adapters={"math": shaken(second, 16)}, in_flight=in_flight)
        assert "pinned" in pinned.details
        assert not {"pins", "pinned"} & set(beside.details)
        stats = engine.metrics()
        if in_flight == "pin":
            assert (stats.pinned_version, stats.pinned_requests) == (old, 1)
        engine.resume_generation()
        new = said(engine, "math")
        assert stamps(engine, "math") == (f"math@{beside.version}", {beside.version})
        *_, last = running
        done = last.outputs[0]
        if in_flight == "pin":
            assert (done.token_ids, done.logprobs.raw) == (alone.token_ids, alone.logprobs.raw)
            assert (done.adapter, {s.version for s in done.weight_versions}) == (
                f"math@{old}",
                {old},
            )
        else:  # what is computed again leaves its pin: that adapter was never with the old base
            assert done.adapter == f"math@{beside.version}"
            assert {s.version for s in done.kv_spans} == {beside.version}
            assert {s.version for s in done.weight_versions} == {old, beside.version}
        engine.reset_prefix_cache()
        for (tokens, *logprobs), (before, *beside_others) in zip(
            said(engine, "math"), new, strict=True
        ):  # another batch, so another rounding
            assert tokens == before
            torch.testing.assert_close(logprobs, beside_others, rtol=0, atol=1e-5)
        back = engine.update_weights(first, adapters={"math": shaken(first, 14)})
        assert back.details["pins"].endswith("s: all ended")
        old = back.version


def test_a_pinned_base_is_never_with_an_adapter_that_is_newer(engine, base) -> None:
    """Of a pinned group: what waits to begin, and what joins it after another adapter's commit."""
    first, second = adapted(base, 17), over_another(adapted(base, 18))
    old = engine.update_weights(first, adapters={"math": first}).version
    was = said(engine, "math")
    long = SamplingParams(
        adapter="math", temperature=0, max_tokens=60, ignore_eos=True, group_id="g"
    )
    short = SamplingParams(adapter="math", group_id="g", **GREEDY)
    other = SamplingParams(adapter="code", group_id="g", **GREEDY)
    for pin_timeout in (30.0, 0.05):
        running = paused(engine, long)
        waiting, answer = in_background(lambda: engine.generate(PROMPTS, short))
        eventually(lambda: engine.metrics().waiting == len(PROMPTS))
        pinned = engine.update_weights(
            second, adapters={"math": second}, in_flight="pin", pin_timeout=pin_timeout
        )
        if pin_timeout == 30.0:
            engine.update_weights(adapters={"math": shaken(second, 19)})
        else:
            eventually(lambda: engine.metrics().pinned_version < 0)
        code = engine.update_weights(adapters={"code": shaken(first, 20)}).version
        joining, joined = in_background(lambda: engine.generate(PROMPTS, other))
        eventually(lambda: engine.metrics().waiting == 2 * len(PROMPTS))
        engine.resume_generation()
        *_, _last = running
        waiting.join(30)
        joining.join(30)
        begun_with, live = (f"math@{old}", old), (f"math@{pinned.version}", pinned.version)
        assert {stamped(output) for output in answer[0]} == {
            begun_with if pin_timeout == 30.0 else live
        }
        assert {stamped(output) for output in joined[0]} == {(f"code@{code}", code)}
        if pin_timeout == 30.0:
            assert [o.outputs[0].token_ids for o in answer[0]] == [one[0] for one in was]
        alone = said(engine, "code")
        for output, (tokens, raw, _) in zip(joined[0], alone, strict=True):
            assert output.outputs[0].token_ids == tokens
            torch.testing.assert_close(output.outputs[0].logprobs.raw, raw, rtol=0, atol=1e-5)
        old = engine.update_weights(first, adapters={"math": shaken(first, 17)}).version
        engine.unload_lora_adapter("code")


def test_a_pinned_request_that_is_aborted_says_which_adapter_made_its_tokens(engine, base) -> None:
    model = adapted(base, 21)
    old = engine.update_weights(model, adapters={"math": model}).version
    running = paused(engine, SamplingParams(adapter="math", temperature=0, max_tokens=60))
    newer, terms = shaken(model, 22), {"pin_timeout": 0.05, "pin_fallback": "abort"}
    engine.update_weights(model, adapters={"math": newer}, in_flight="pin", **terms)
    *_, last = running
    engine.resume_generation()
    assert last.outputs[0].finish_reason == "abort"
    assert stamped(last) == (f"math@{old}", old)


def test_a_sample_that_ends_as_it_is_moved_says_which_adapter_made_its_tokens(engine, base) -> None:
    model = adapted(base, 23)
    old = engine.update_weights(adapters={"math": model}).version
    for more in ({}, {"max_staleness": 0, "on_stale": "finish"}):
        params = SamplingParams(adapter="math", temperature=0, max_tokens=60, **more)
        running = paused(engine, params)
        newer = engine.update_weights(adapters={"math": shaken(model, 24)}, in_flight="recompute")
        if not more:
            engine.abort()
        *_, last = running
        engine.resume_generation()
        done = last.outputs[0]
        assert done.finish_reason == ("length" if more else "abort")
        assert {span.version for span in done.weight_versions} == {old}
        assert done.adapter == f"math@{old}"
        old = newer.version


def test_what_goes_on_from_another_engine_keeps_the_versions_of_its_tokens(engine, base) -> None:
    model = adapted(base, 25)
    old = engine.update_weights(adapters={"math": model}).version
    params = SamplingParams(adapter="math", temperature=0, max_tokens=8, ignore_eos=True)
    [begun] = engine.generate([PROMPTS[0]], replace(params, max_tokens=5))
    going_on = replace(begun.outputs[0], finish_reason=None)
    newer = engine.update_weights(adapters={"math": shaken(model, 26)}).version
    prompt = ContinuedPrompt(tuple(PROMPTS[0]), (going_on,))
    done = engine.generate([prompt], params)[0].outputs[0]
    assert [(s.version, s.start, s.stop) for s in done.weight_versions] == [
        (old, 0, 5),
        (newer, 5, 8),
    ]
    assert (done.staleness, done.adapter) == (newer - old, f"math@{newer}")
    stale = replace(params, max_staleness=0, on_stale="finish")
    ended = engine.generate([prompt], stale)[0].outputs[0]
    assert (ended.token_ids, ended.stop_reason) == (going_on.token_ids, "max_staleness")
    assert ended.adapter == f"math@{old}"


def test_caches_of_the_base_outlive_an_adapters_commit(engine, base) -> None:
    params = SamplingParams(**GREEDY)
    engine.update_weights(adapters={"math": adapted(base, 11)})
    engine.generate([PROMPTS[0]], params)
    engine.update_weights(adapters={"math": adapted(base, 12)})
    [output] = engine.generate([PROMPTS[0]], params)
    assert output.num_cached_tokens == 32


@contextmanager
def slots_held(engine: Rollout, model: Any) -> Iterator[None]:
    """Every slot is taken, by streams that stand still; they end as they should."""
    long = SamplingParams(adapter="math", temperature=0, max_tokens=100, ignore_eos=True)
    engine.update_weights(adapters={"math": model})
    streams = []
    try:
        for seed in range(3):
            engine.resume_generation()
            streams.append(engine.stream(PROMPTS[0], long))
            next(streams[-1])
            engine.pause_generation("keep")
            engine.update_weights(adapters={"math": shaken(model, seed)})
        yield
    finally:
        engine.resume_generation()
    for stream in streams:
        *_, last = stream
        assert len(last.outputs[0].token_ids) == 100


def test_no_slot_is_waited_for_longer_than_the_updates_timeout(engine, base) -> None:
    model = adapted(base, 13)
    with slots_held(engine, model):
        with pytest.raises(EngineOverloaded, match=r"no slot became free within 1 s"):
            engine.update_weights(adapters={"math": model}, timeout=1)
        with pytest.raises(EngineOverloaded, match="no slot became free"):
            engine.update_weights(base, adapters={"math": model}, staging="none", timeout=1)
        assert engine.metrics().state == "paused"
    engine.update_weights(adapters={"math": model})


@pytest.mark.parametrize("staging", ["none", "device"])
def test_a_refused_adapter_costs_neither_weights_nor_rollback(engine, base, staging) -> None:
    model = adapted(base, 23)
    engine.update_weights(adapters={"math": model})
    plain = said(engine, None)
    engine.update_weights(base)
    engine.update_weights(base)  # can be rolled back
    version = engine.weight_version
    many = {f"other{index}": model for index in range(4)}
    with pytest.raises(ConfigError, match="no slot can become free"):
        engine.update_weights(base, adapters=many, staging=staging)
    with (
        closing(engine._async.backend.open()) as channel,
        pytest.raises(ConfigError, match=r"changes model\.embed_tokens, which is no linear"),
    ):
        channel.begin(request("model.embed_tokens", staging, POLICY))
    assert (engine.weight_version, engine.metrics().state) == (version, "running")
    assert said(engine, None) == plain
    assert engine.rollback().version == version + 1


def request(module: str, staging: str = "auto", *models: str) -> UpdateRequest:
    spec = AdapterSpec(modules={module: ModuleSpec(rank=2, scaling=1.0)})
    return UpdateRequest(
        update_id=secrets.token_hex(8), bucket_bytes=1 << 20, timeout=60.0, staging=staging,
        components=(*models, "adapter/math"), adapters={"math": spec},
    )  # fmt: skip


def test_a_begin_that_waits_for_a_slot_ends_with_its_channel(engine, base) -> None:
    with slots_held(engine, adapted(base, 27)):
        channel = engine._async.backend.open()
        threading.Timer(0.1, channel.close).start()
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="closed its channel, before the update had begun"):
            channel.begin(request("model.layers.0.self_attn.q_proj"))
        assert time.monotonic() - started < 30
        assert engine.weight_info().state == "idle"


def test_a_model_is_not_merged_below_its_own_adapter_whatever_it_is_wrapped_in(
    engine, base
) -> None:
    model = adapted(base, 29)
    engine.update_weights(model, adapters={"math": model})
    wanted = said(engine, "math")
    engine.unload_lora_adapter("math")
    engine.update_weights(model.get_base_model(), adapters={"math": model})
    assert engine.check_weights(base).equal
    assert said(engine, "math") == wanted
    engine.unload_lora_adapter("math")
    with pytest.raises(ConfigError, match="would be merged into the base, and math served on top"):
        engine.update_weights(adapted(base, 30), adapters={"math": model})


def test_what_a_rollback_of_adapters_alone_brings_back_is_in_its_receipt(engine, base) -> None:
    model = adapted(base, 31)
    first = engine.update_weights(adapters={"math": model})
    engine.update_weights(adapters={"math": shaken(model, 5)})
    back = engine.rollback()
    assert back.adapters == {"math": first.adapters["math"]}
    told = first.adapters["math"]
    assert (back.digest, back.num_tensors) == (told.digest, told.num_tensors)
    assert back.num_bytes == told.num_bytes


def test_a_read_that_is_asked_for_again_is_still_live_beneath_adapters(base, tmp_path) -> None:
    with Rollout(base, weight_dirs=(str(base.parent),), **SETTINGS) as engine:
        asked = {"server_path": base, "update_id": "read-once"}
        first = engine.update_weights(**asked)
        engine.update_weights(adapters={"math": adapted(base, 33)})
        assert engine.update_weights(**asked) == first
        assert engine.weight_version == first.version + 1


def dies_midway(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, value) in enumerate(model.get_base_model().state_dict().items()):
        if index == 5:
            raise OSError("the disk is gone")
        if "lora_" not in name:
            yield name.replace(".base_layer", ""), value * 2


def test_adapters_alone_mend_no_weights_that_are_broken(engine, base, monkeypatch) -> None:
    model, other = adapted(base, 17), shaken(adapted(base, 17), 18)
    coordinator = engine._async.backend.coordinator

    def refused() -> None:
        for verb in (engine.rollback, lambda: said(engine, "math")):
            with pytest.raises(EngineBroken, match="until a full update"):
                verb()
        assert engine.metrics().state == "broken"
        assert engine.weight_version == version

    engine.update_weights(model, adapters={"math": model})
    old = said(engine, "math")
    version = engine.update_weights(adapters={"math": other}).version
    with pytest.raises(SourceFailed):
        engine.update_weights(dies_midway(model), staging="none")
    refused()
    engine.update_weights(model, adapters={"math": model})
    assert said(engine, "math") == old
    version = engine.update_weights(adapters={"math": other}).version
    advance = coordinator.turn.advance

    def asleep_at_its_commit(lease: object, state: str) -> None:
        advance(lease, state)
        if state == "committing":
            engine.sleep(2)

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.turn, "advance", asleep_at_its_commit)
        with pytest.raises(EngineBroken, match="until a full update"):
            engine.update_weights(adapters={"math": model})
    engine.wake_up()
    refused()
    engine.update_weights(model, adapters={"math": model})
    assert said(engine, "math") == old


def test_a_commit_that_fails_after_one_of_adapters_alone_goes_back_in_all(
    engine, base, monkeypatch
) -> None:
    first, second = adapted(base, 19), shaken(adapted(base, 19), 20)
    core = engine._async.backend.core
    engine.update_weights(first, adapters={"math": first})
    version = engine.update_weights(adapters={"math": first}).version
    before = said(engine, "math"), said(engine, None), engine.weight_info().adapters
    for models in ((second,), ()):
        with monkeypatch.context() as patch:
            patch.setattr(core.outputs, "end_stale", lambda *_: 1 // 0)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                engine.update_weights(*models, adapters={"math": second, "new": second})
        assert engine.metrics().state == "running"
        assert engine.weight_version == version
        assert (said(engine, "math"), said(engine, None), engine.weight_info().adapters) == before
    receipt = engine.update_weights(second, adapters={"math": second})
    assert stamps(engine, "math") == (f"math@{receipt.version}", {receipt.version})


def test_slots_that_come_too_late_are_free_again(engine, base, monkeypatch) -> None:
    model, backend = adapted(base, 21), engine._async.backend
    adapters, table = backend.coordinator.adapters, backend.core.adapters
    go_on, take = threading.Event(), adapters._take

    def late(names: Any, after: Any) -> Any:
        assert go_on.wait(20)
        return take(names, after)

    def refused() -> None:
        with pytest.raises(DeadlineExceeded, match=r"slots for the adapters math \(phase: begin"):
            engine.update_weights(adapters={"math": model}, timeout=0.1)
        go_on.set()
        for _ in range(2):  # what gives them back is asked for by then
            backend.core.at_step_boundary(lambda: None).result(20)
        assert not table._reserved

    busy = backend.core.at_step_boundary(lambda: go_on.wait(20))
    refused()
    assert busy.result(20)
    go_on.clear()
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "_take", late)
        refused()
    engine.update_weights(adapters={"math": model})


def test_after_a_commit_of_adapters_alone_the_models_weights_can_be_read(
    engine, base, tmp_path
) -> None:
    model = adapted(base, 22)
    weights = engine.update_weights(model, adapters={"math": model})
    assert engine.update_weights(adapters={"math": model}).version > weights.version
    core, tensors = engine._async.backend.core, engine.weight_info().tensors
    assert [name for name, _ in live_weights(core, tensors, 30)] == [meta.name for meta in tensors]
    assert engine.save_sharded_state(tmp_path / "state") == weights.version


def test_adapters_are_voted_on_while_the_models_weights_are_parked(base) -> None:
    with Rollout(base, **SETTINGS) as rollout:
        executor: Any = rollout._async.backend.core._executor
        instances = executor._worker.runner.instances
        instances._parked = {"": torch.empty(0)}  # as sleep(1) leaves them on a GPU
        rollout.update_weights(adapters={"math": adapted(base, 26)})
        instances._parked = {}
        assert stamps(rollout, "math")[0] == "math@1"


def test_what_was_unloaded_is_not_brought_back(engine, base) -> None:
    model = adapted(base, 23)
    for models in ((), (model,)):
        engine.update_weights(model, adapters={"math": model})
        engine.update_weights(*models, adapters={"math": shaken(model, 24)})
        assert engine.unload_lora_adapter("math")
        if models:
            assert engine.rollback().adapters == {}
        else:
            with pytest.raises(VersionConflict, match="no predecessor"):
                engine.rollback()
        assert "math" not in engine.weight_info().adapters


def test_copies_for_deltas_last_only_where_nobody_committed_in_between(engine, base) -> None:
    model, before = adapted(base, 25), engine.weight_info()
    copies, place = DeltaBase(), ("x", Box.full((1,)))
    copies.put(Committed(epoch=before.epoch, version=before.version, values={place: torch.ones(1)}))
    first = engine.update_weights(adapters={"math": model})
    copies.stays(before, first)
    assert copies.nbytes == 4
    between = engine.weight_info()
    engine.update_weights(model, adapters={"math": model})
    copies.stays(between, engine.update_weights(adapters={"math": model}))
    assert copies.nbytes == 0


def test_an_adapter_is_not_served_on_a_base_that_it_was_merged_into(base, tmp_path) -> None:
    model, twice = adapted(base, 41), "sent merged with default: .* would count twice"
    store = LocalStore(tmp_path / "versions")
    VersionWriter(store, dtype=torch.float32).write(model, 70)
    model.save_pretrained(tmp_path / "files")
    with Rollout(base, weight_dirs=[str(tmp_path)], **SETTINGS) as rollout:

        def refused() -> None:
            version, held = rollout.weight_version, said(rollout, None)
            for send in (
                lambda: rollout.update_weights(model, adapters_only=True),
                lambda: rollout.update_weights(adapters={"math": model}),
                lambda: rollout.load_lora_adapter("math", tmp_path / "files"),
            ):
                with pytest.raises(ConfigError, match=twice):
                    send()
            assert rollout.weight_info().merged == ("default",)
            assert (rollout.weight_version, said(rollout, None)) == (version, held)

        plain = said(rollout, None)
        told = rollout.update_weights(model).details
        assert told["merged_adapters"] == "default"
        assert "adapters_only=True" in told["unmerged_by"]
        merged = said(rollout, None)
        refused()
        rollout.update_weights(model, adapters={"math": model})
        assert said(rollout, None) == plain
        right = said(rollout, "math")
        assert right[0][0] == merged[0][0]
        with pytest.raises(ConfigError, match="would be merged into the base, and math served"):
            rollout.update_weights(model)
        rollout.rollback()
        assert said(rollout, None) == merged
        refused()
        with model.disable_adapter():
            rollout.update_weights(model, partial=True)  # what it leaves may be merged still
            refused_after = rollout.weight_info().merged
            rollout.update_weights(model)
        assert (refused_after, rollout.weight_info().merged) == (("default",), ())
        rollout.update_weights(model, adapters_only=True)
        assert said(rollout, "default") == right
        with pytest.raises(ConfigError, match="would be merged into the base, and default served"):
            rollout.update_weights(server_path=tmp_path / "versions" / f"{70:012}", version=70)
        assert rollout.unload_lora_adapter("default")
        rollout.update_weights(server_path=tmp_path / "versions" / f"{70:012}", version=70)
        assert said(rollout, None) == merged
        refused()
        rollout.update_weights(adapted(base, 41).merge_and_unload())
        rollout.load_lora_adapter("math", tmp_path / "files")  # on top, as it was asked for
        assert said(rollout, "math") != right


def test_an_engine_without_slots_says_what_to_do(base) -> None:
    with Rollout(base, **(SETTINGS | {"max_adapters": 0})) as plain:
        with pytest.raises(ConfigError, match=r"max_adapters=, or send .* merged"):
            plain.update_weights(adapters={"math": adapted(base, 1)})
        with pytest.raises(ConfigError, match="takes a source, adapters= or both"):
            plain.update_weights()
