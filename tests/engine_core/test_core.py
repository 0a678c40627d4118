"""The whole engine over the toy model: admission, control, commits, failures, text."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_core.harness import PROMPT, Sink, Start, commit, held, request, run
from engine_core.toy_model import VOCAB, ToyExecutor, chain, continuation, logprob_of, write_config
from shared_engines import eventually

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.engine.sequences.sequence import Sequence as TokenSequence
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    PromptTooLong,
    WorkerDied,
)
from rollout.generation import RequestOutput, VersionSpan

# ---- requests ----


def test_a_request_gives_the_models_tokens_logprobs_and_spans(start: Start) -> None:
    core = start()
    out = run(core, request(max_tokens=7, logprobs=2))["a"]
    sample = out.outputs[0]
    tokens = continuation(PROMPT, 7)
    assert sample.token_ids == tokens
    states = chain(PROMPT + tokens[:-1], [0] * (len(PROMPT) + 6))[len(PROMPT) - 1 :]
    assert sample.logprobs.raw == [logprob_of(s) for s in states]
    assert sample.cumulative_logprob == sum(sample.logprobs.raw)
    assert [set(top) for top in sample.logprobs.top or []] == [{t} for t in tokens]
    assert (sample.finish_reason, sample.text) == ("length", "")
    assert sample.weight_versions == (VersionSpan(0, 0, 7),)
    assert sample.kv_spans == (VersionSpan(0, 0, len(PROMPT) + 6),)
    assert (out.epoch, out.prompt_logprobs, out.num_cached_tokens) == (core.epoch, None, 0)


def test_prompt_logprobs_cover_the_prompt_across_chunks_and_despite_a_cached_prefix(
    start: Start,
) -> None:
    core = start(max_num_batched_tokens=5)
    run(core, request(max_tokens=2))
    out = run(core, request(max_tokens=2, prompt_logprobs=0))["a"]
    states = chain(PROMPT, [0] * len(PROMPT))
    expected = [{t: logprob_of(s)} for t, s in zip(PROMPT[1:], states, strict=False)]
    assert out.prompt_logprobs == [None, *expected]
    assert out.num_cached_tokens == 0


def test_prompt_logprobs_are_of_the_weights_that_the_prompt_begins_again_with(
    start: Start,
) -> None:
    toy = ToyExecutor()
    core = start(toy, max_num_batched_tokens=len(PROMPT) - 1)
    toy.gate.clear()  # the first step: all of the prompt but its last token
    sink = Sink()
    core.submit([request(max_tokens=2, prompt_logprobs=0)], sink, stream=False)
    eventually(lambda: toy.begun == 1)

    def boundary() -> None:
        for future in core.call("commit", {"version": 1}):
            future.result(5)
        core.on_commit(1, "recompute")

    committed = core.at_step_boundary(boundary)
    toy.gate.set()
    committed.result(10)
    out = sink.results()["a"]
    assert out.outputs[0].kv_spans == (VersionSpan(1, 0, len(PROMPT) + 1),)
    states = chain(PROMPT, [toy.contents[1]] * len(PROMPT))
    expected = [{t: logprob_of(s)} for t, s in zip(PROMPT[1:], states, strict=False)]
    assert out.prompt_logprobs == [None, *expected]


def test_a_stream_is_cumulative_and_ends_like_the_unstreamed_call(start: Start) -> None:
    core = start()
    sink = Sink()
    core.submit([request(max_tokens=9)], sink, stream=True)
    final = sink.results()["a"]
    lengths = [len(o.outputs[0].token_ids) for o in sink.items if isinstance(o, RequestOutput)]
    assert lengths == list(range(1, 10))
    assert final.outputs[0].token_ids == run(core, request(max_tokens=9))["a"].outputs[0].token_ids


def test_a_snapshot_copies_nothing_until_taken_and_stays_as_it_was(start: Start) -> None:
    core = start()
    taken: list[Any] = []
    done = threading.Event()

    def sink(item: Any) -> None:
        taken.append(item)
        if item.finished:
            done.set()

    core.submit([request(max_tokens=9, logprobs=1)], sink, stream=True)
    assert done.wait(10)
    tokens = continuation(PROMPT, 9)
    for count, snapshot in enumerate(taken, 1):
        assert snapshot.samples[0].sequence is taken[-1].samples[0].sequence
        sample = snapshot.output().outputs[0]
        assert sample.token_ids == tokens[:count]
        assert len(sample.logprobs.raw) == len(sample.logprobs.top) == count
        sample.token_ids.clear()  # the caller's own
    assert taken[-1].output().outputs[0].token_ids == tokens


def test_one_call_is_admitted_whole_in_one_step_or_not_at_all(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    run(core, *[request(str(i), PROMPT[i:], max_tokens=1) for i in range(6)])
    assert toy.steps == 1
    for bad, error in (
        ([1, VOCAB], InvalidRequest),
        ([-1], InvalidRequest),
        ([], InvalidRequest),
        ([1.0], InvalidRequest),
        ([1] * 256, PromptTooLong),
    ):
        sink = Sink()
        with pytest.raises(error):
            core.submit([request("good"), request("bad", bad)], sink, stream=False)
        assert sink.items == []
    with pytest.raises(InvalidRequest, match="twice"):
        core.submit([request("x"), request("x")], Sink(), stream=False)
    with pytest.raises(InvalidRequest, match=r"97 in stop_token_ids.* vocabulary of 97"):
        core.submit([request("x", stop_token_ids=(97,))], Sink(), stream=False)
    assert toy.steps == 1
    run(core, request("good", max_tokens=1))


def test_stop_ids_eos_min_tokens_and_the_length_limit_end_a_sample(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    tokens = continuation(PROMPT, 20)
    out = run(core, request(max_tokens=20, stop_token_ids=(tokens[5],)))["a"].outputs[0]
    first = tokens.index(tokens[5])
    assert (out.token_ids, out.finish_reason) == (tokens[: first + 1], "stop")
    assert out.stop_reason == tokens[5]
    long = run(core, request(max_tokens=None))["a"].outputs[0]
    assert len(PROMPT) + len(long.token_ids) == core.max_model_len == 256
    assert long.finish_reason == "length"
    core.close()
    write_config(tmp_path, eos_token_id=tokens[2])
    toy = ToyExecutor()
    with_eos = EngineCore(
        EngineConfig(model=str(tmp_path), num_kv_blocks=80, block_size=4), executor=toy
    )
    with_eos.start()
    try:
        out = run(with_eos, request(max_tokens=20))["a"].outputs[0]
        assert (out.finish_reason, out.stop_reason, len(out.token_ids)) == ("stop", None, 3)
        out = run(with_eos, request(max_tokens=20, ignore_eos=True))["a"].outputs[0]
        assert out.finish_reason == "length"
    finally:
        with_eos.close()


def test_samples_of_one_request_have_their_own_seeds_and_arrive_together(start: Start) -> None:
    core = start()
    out = run(core, request(n=3, max_tokens=4, seed=7))["a"]
    assert [c.index for c in out.outputs] == [0, 1, 2]
    assert [c.token_ids for c in out.outputs] == [continuation(PROMPT, 4)] * 3


def test_samples_that_have_not_run_have_one_list_of_the_prompts_tokens(start: Start) -> None:
    core, sink = start(max_num_seqs=2, max_num_batched_tokens=16), Sink()
    core.control.pause().result()
    core.submit([request(n=6, max_tokens=4)], sink, stream=False)
    core.control.abort([]).result()  # they are admitted before
    lists = [seq.token_ids for seq in core.scheduler.sequences()]
    assert len(lists) == 6
    assert all(ids is lists[0] for ids in lists)
    core.control.resume().result()
    outputs = sink.results()["a"].outputs
    assert [c.token_ids for c in outputs] == [continuation(PROMPT, 4)] * 6
    assert lists[0] == PROMPT


def test_more_requests_than_memory_all_finish_with_the_right_tokens(start: Start) -> None:
    core = start(num_kv_blocks=20, max_model_len=80, max_num_batched_tokens=16)
    prompts = {str(i): [(7 * i + j) % VOCAB for j in range(10 + i)] for i in range(12)}
    outs = run(core, *[request(k, p, max_tokens=20) for k, p in prompts.items()])
    assert core.stats().preemptions_total > 0
    for key, out in outs.items():
        assert out.outputs[0].token_ids == continuation(prompts[key], 20)


def test_abort_ends_a_request_with_what_it_has(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 3, max_tokens=200)
    assert core.control.abort(["a", "unknown"]).result() == 1
    out = sink.results()["a"].outputs[0]
    assert out.finish_reason == "abort"
    assert out.token_ids == continuation(PROMPT, 200)[: len(out.token_ids)]
    core.control.resume().result()
    assert core.blocks.num_free == core.num_kv_blocks


def test_a_sink_that_raises_loses_only_its_own_call(start: Start) -> None:
    core = start()

    def bad(item: Any) -> None:
        raise RuntimeError("sink")

    other = Sink()
    core.submit([request("bad", max_tokens=50)], bad, stream=True)
    core.submit([request("good", max_tokens=50)], other, stream=True)
    assert other.results()["good"].outputs[0].token_ids == continuation(PROMPT, 50)
    run(core, request("bad", max_tokens=1))


# ---- commits ----


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
def test_what_a_commit_does_to_a_running_request(start: Start, in_flight: str) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 5, max_tokens=40)
    commit(core, 1, in_flight)
    core.control.resume().result()
    sample = sink.results()["a"].outputs[0]
    if in_flight == "abort":
        assert sample.finish_reason == "abort"
        assert sample.weight_versions[-1].version == 0
    else:
        done = sample.weight_versions[0].stop
        assert [s.version for s in sample.weight_versions] == [0, 1]
        before = continuation(PROMPT, done)
        assert sample.token_ids[:done] == before
        if in_flight == "recompute":
            after = continuation(PROMPT + before, 40 - done, weights=1)
            assert sample.token_ids[done:] == after
            assert sample.kv_spans == (VersionSpan(1, 0, len(PROMPT) + 39),)
        else:
            border = len(PROMPT) + done - 1
            kv = [0] * border + [1] * (len(PROMPT) + 39 - border)
            states = chain(PROMPT + sample.token_ids[:-1], kv)
            assert sample.token_ids == [s % VOCAB for s in states[len(PROMPT) - 1 :]]
            assert [s.version for s in sample.kv_spans] == [0, 1]
            assert sample.kv_spans[0].stop == border
    fresh = run(core, request("b", max_tokens=5))["b"]
    assert fresh.outputs[0].token_ids == continuation(PROMPT, 5, weights=1)
    assert fresh.num_cached_tokens == (16 if in_flight == "recompute" else 0)


def test_a_drain_lets_running_requests_end_and_admits_no_other(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy, max_num_seqs=1)
    first, second = Sink(), Sink()
    core.submit([request("a", max_tokens=60)], first, stream=True)
    core.submit([request("b", max_tokens=5)], second, stream=False)
    first.wait_for(1)
    core.control.drain(5)
    assert first.results()["a"].outputs[0].finish_reason == "length"
    commit(core, 1, "wait")
    assert second.items == []
    core.control.undrain()
    assert second.results()["b"].outputs[0].token_ids == continuation(PROMPT, 5, weights=1)


def test_a_drain_that_cannot_end_says_so_and_generation_goes_on(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 2, max_tokens=100)
    with pytest.raises(DeadlineExceeded):
        core.control.drain(0.05)
    core.control.resume().result()
    assert len(sink.results()["a"].outputs[0].token_ids) == 100
    run(core, request("b"))


def test_a_rank_with_another_version_breaks_the_engine_until_a_commit(start: Start) -> None:
    toy = ToyExecutor(size=2)
    core = start(toy)
    toy.lie = True
    with pytest.raises(EngineBroken):
        run(core, request())
    with pytest.raises(EngineBroken):
        core.submit([request("b")], Sink(), stream=False)
    assert core.state == "broken"
    toy.lie = False
    commit(core, 1)
    assert core.state == "running"
    run(core, request("b"))


# ---- control ----


def test_pause_modes(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 3, max_tokens=100)
    count, steps = len(sink.items), toy.steps
    time.sleep(0.05)
    assert (len(sink.items), toy.steps, core.state) == (count, steps, "paused")
    core.control.resume().result()
    core.control.pause("wait", 5).result()
    assert len(sink.results()["a"].outputs[0].token_ids) == 100
    late = Sink()
    core.submit([request("late", max_tokens=3)], late, stream=False)
    core.control.pause("abort").result()
    assert late.results()["late"].outputs[0].token_ids == []
    core.control.resume().result()
    run(core, request("b"))
    with pytest.raises(InvalidRequest):
        core.control.pause("sometimes").result()


def test_a_reset_has_what_runs_computed_again_paused_or_not(start: Start) -> None:
    core = start()
    sink = held(core, 3, max_tokens=20)
    core.control.reset_prefix_cache().result()
    assert core.scheduler.running
    core.control.reset_prefix_cache(reset_running_requests=True).result()
    assert (core.scheduler.running, core.blocks.usage, core.state) == ([], 0.0, "paused")
    core.control.resume().result()
    assert len(sink.results()["a"].outputs[0].token_ids) == 20
    core.control.reset_prefix_cache(reset_running_requests=True).result()
    assert core.state == "running"


def test_a_pause_is_warned_of_by_the_first_call_that_waits(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    core = start()
    for mode in ("keep", "wait"):
        caplog.clear()
        core.control.pause(mode, 5).result()
        assert not caplog.records
        sinks = [Sink(), Sink()]
        for name, sink in zip(("a", "b"), sinks, strict=True):
            core.submit([request(name, max_tokens=1)], sink, stream=False)
        core.control.pause("keep").result()  # the same pause
        core.control.resume().result()
        for sink in sinks:
            sink.results()
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert "paused until resume_generation()" in record.getMessage()
        assert "request a waits" in record.getMessage()
    run(core, request("c", max_tokens=1))
    assert len(caplog.records) == 1


def test_who_waits_behind_a_pause_for_what_runs_is_told_so(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 3, max_tokens=40)  # paused
    for wait in (
        lambda: core.control.drain(0.05),
        lambda: core.control.finish_before_sleep(0.05).result(),
        lambda: core.control.pause("wait", 0.05).result(),
    ):
        with pytest.raises(DeadlineExceeded, match=r"0.05 s: generation is paused until resume"):
            wait()
    core.control.resume().result()
    sink.results()


def test_sleep_refuses_calls_and_a_frozen_request_goes_on_after_it(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 3, max_tokens=40)
    core.control.resume().result()
    core.control.sleep(1).result()
    with pytest.raises(EngineClosed, match="asleep"):
        core.submit([request("b")], Sink(), stream=False)
    core.control.wake_up(["weights"]).result()
    assert core.state == "asleep"
    core.control.wake_up().result()
    assert sink.results()["a"].outputs[0].token_ids == continuation(PROMPT, 40)
    with pytest.raises(InvalidRequest, match="moon"):
        core.control.wake_up(["moon"]).result()


def test_after_deep_sleep_only_a_commit_makes_the_engine_generate(start: Start) -> None:
    core = start()
    core.control.sleep(2).result()
    core.control.wake_up().result()
    with pytest.raises(EngineBroken, match="dropped the weights"):
        core.submit([request()], Sink(), stream=False)
    commit(core, 1)
    assert run(core, request(max_tokens=3))["a"].outputs[0].token_ids == continuation(PROMPT, 3, 1)


def test_boundaries_run_in_order_between_steps_and_hand_back_errors(start: Start) -> None:
    core = start()
    seen: list[int] = []
    futures = [core.at_step_boundary(lambda i=i: seen.append(i)) for i in range(20)]
    failing = core.at_step_boundary(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(5)
    for future in futures:
        future.result(5)
    assert seen == list(range(20))


# ---- failures ----


def test_a_dying_worker_ends_everything_at_once(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    toy.gate.clear()
    sink = Sink()
    core.submit([request()], sink, stream=False)
    began = time.monotonic()
    toy.kill()
    with pytest.raises(WorkerDied):
        sink.results()
    assert time.monotonic() - began < 25
    assert core.state == "dead"
    for use in (
        lambda: core.submit([request("b")], Sink(), stream=False),
        lambda: core.control.pause().result(),
        lambda: core.call("info", {}),
    ):
        with pytest.raises(WorkerDied):
            use()
    core.mark_broken("an update failed")
    assert core.broken is None  # no update mends it


def test_a_death_behind_another_ranks_error_is_what_callers_hear(start: Start) -> None:
    toy = ToyExecutor(size=2)
    core = start(toy)
    toy.split = [EngineError("connection reset by peer"), WorkerDied("rank 1 died")]
    with pytest.raises(WorkerDied, match="rank 1"):
        run(core, request())
    assert core.state == "dead"


def test_a_failed_step_ends_its_requests_and_no_others(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    toy.fail_next = EngineError("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        run(core, request())
    assert run(core, request(max_tokens=3))["a"].outputs[0].token_ids == continuation(PROMPT, 3)
    assert core.blocks.num_free == core.num_kv_blocks
    assert core.stats().requests_finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}


def test_close_ends_pending_calls_and_refuses_new_ones(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 1, max_tokens=100)
    core.close()
    with pytest.raises(EngineClosed):
        sink.results()
    assert toy.closed
    with pytest.raises(EngineClosed):
        core.submit([request("b")], Sink(), stream=False)
    with pytest.raises(EngineClosed):
        core.control.pause().result()
    assert core.state == "closed"


def test_a_bad_configuration_is_refused_with_sizes_and_leaves_nothing(start: Start) -> None:
    toy = ToyExecutor()
    with pytest.raises(ConfigError, match=r"one sequence: max_model_len 200 needs 50 .* 8 fit"):
        start(toy, num_kv_blocks=8, max_model_len=200)
    assert toy.closed
    with pytest.raises(ConfigError, match="shadow"):
        start(ToyExecutor(free_bytes=500), num_kv_blocks=None)
    with pytest.raises(ConfigError, match="own maximum of 256"):
        start(max_model_len=300)
    with pytest.raises(ConfigError, match="divisible by tensor parallel size"):
        start(tensor_parallel_size=4)
    assert start(num_kv_blocks=8).max_model_len == 32
    assert start(num_kv_blocks=None, kv_cache_bytes=2500).num_kv_blocks == 25
    assert start(num_kv_blocks=None, max_num_seqs=2).num_kv_blocks == 128


def test_a_cache_that_cuts_the_longest_sequence_is_warned_of(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start(num_kv_blocks=64, max_model_len=32)
    start(num_kv_blocks=64)
    assert not caplog.records
    start(num_kv_blocks=8)
    [record] = caplog.records
    assert re.search(r"end at 32 tokens, not at the model's 256: .* raise", record.getMessage())


def test_figures_count_what_happened(start: Start) -> None:
    core = start()
    run(core, request("a", max_tokens=4), request("b", max_tokens=4))
    run(core, request("c", max_tokens=4))
    core.counters.record_failed_update("u1", "the disk went away")
    core.counters.record_update(0.5)
    stats = core.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (3 * len(PROMPT), 12)
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (54, 32)
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert (stats.time_to_first_token.count, stats.inter_token.count) == (3, 9)
    assert (stats.weight_updates_total, stats.weight_updates_failed_total) == (1, 1)
    assert stats.weight_update_errors == ("u1: the disk went away",)
    assert (stats.last_stall_seconds, stats.state, stats.epoch) == (0.5, "running", core.epoch)


# ---- what waits ----


def hold_boundary(core: EngineCore) -> threading.Event:
    """The engine's thread stands in a boundary until the event is set."""
    there, go = threading.Event(), threading.Event()

    def stand() -> None:
        there.set()
        go.wait(60)

    core.at_step_boundary(stand)
    assert there.wait(30)
    return go


def test_calls_submitted_while_the_engine_closes_are_answered(start: Start) -> None:
    core = start()
    go = hold_boundary(core)
    sinks = [Sink() for _ in range(3)]
    for number, sink in enumerate(sinks):
        core.submit([request(str(number))], sink, stream=False)
    closing = threading.Thread(target=core.close)
    closing.start()
    while not core.loop.closed:
        time.sleep(0.001)
    go.set()
    closing.join(30)
    for sink in sinks:
        with pytest.raises(EngineClosed, match="shut down"):
            sink.results()
    late = Sink()
    core._closed = False  # as a caller sees it that came a moment earlier
    core.submit([request("late")], late, stream=False)
    core._closed = True
    with pytest.raises(EngineClosed):
        late.results()
    assert not core.inputs.live_ids


def test_a_call_that_cannot_be_admitted_hears_why(start: Start) -> None:
    core = start()
    core.inputs.build = lambda *args: 1 // 0
    sink = Sink()
    core.submit([request("a")], sink, stream=False)
    with pytest.raises(EngineError, match="could not be admitted: ZeroDivisionError"):
        sink.results()
    del core.inputs.build
    run(core, request("a", max_tokens=1))


@pytest.mark.parametrize("timeout", [1e300, float("inf"), float("nan"), -1.0, 0, "1", True])
def test_an_absurd_timeout_is_refused_and_shuts_no_gate(start: Start, timeout: Any) -> None:
    core = start()
    for verb in (
        lambda: core.control.pause("wait", timeout).result(),
        lambda: core.control.pause("keep", timeout).result(),
        lambda: core.control.sleep(1, timeout=timeout).result(),
        lambda: core.control.wake_up(timeout=timeout).result(),
    ):
        with pytest.raises(InvalidRequest, match="timeout must be a number of seconds"):
            verb()
    assert core.state == "running"
    run(core, request(max_tokens=1))


def test_whoever_gives_up_waiting_opens_no_gate_of_others(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 3, max_tokens=60)
    patient = core.control.pause("wait", 60)
    with pytest.raises(DeadlineExceeded):
        core.control.pause("wait", 0.05).result()
    assert core.state == "paused"
    core.at_step_boundary(lambda: core.loop.pause_state._freezes.clear()).result(30)
    core.at_step_boundary(lambda: core.loop.pause_state._apply()).result(30)
    sink.results()
    patient.result()
    assert core.state == "paused"
    core.control.resume().result()
    go = hold_boundary(core)
    with pytest.raises(DeadlineExceeded):
        core.control.pause("wait", 0.05).result()  # it never came to shut anything
    go.set()
    run(core, request("b", max_tokens=1))
    assert core.state == "running"


def test_a_resume_overrules_a_pause_that_still_waits(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy)
    sink = held(core, 3, max_tokens=60)
    waiting = core.control.pause("wait", 60)
    core.control.resume().result()
    sink.results()
    waiting.result()
    assert core.state == "running"
    run(core, request("b", max_tokens=1))


def test_a_commit_that_fails_in_the_engine_leaves_its_version_and_its_cache(start: Start) -> None:
    """The number was never seen, and nothing computed before or after it is taken for it."""
    core = start()
    run(core, request(max_tokens=2))
    honest = core.scheduler.recompute

    def failing(sequences: object = None) -> None:
        raise RuntimeError("no memory to requeue")

    core.scheduler.recompute = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        commit(core, 1, "recompute")
    core.scheduler.recompute = honest  # type: ignore[method-assign]
    assert (core.version, core.blocks.version, core.broken) == (0, 0, None)
    for future in core.call("revert", {"version": 0}):
        future.result(5)
    again = run(core, request(max_tokens=2))["a"]
    assert again.num_cached_tokens > 0
    commit(core, 1)
    assert run(core, request(max_tokens=2))["a"].num_cached_tokens == 0


class LongCalls(ToyExecutor):
    """Ranks that are at a ``collective_rpc`` until its ``replies`` are there."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.replies: list[Future[Any]] = []
        self.asked, self.queued_behind = threading.Event(), threading.Event()

    def call(self, method: str, args: Any, tensors: Any = None) -> list[Future[Any]]:
        if method == "collective_rpc":
            self.replies = [Future() for _ in range(self.size)]
            self.asked.set()
            return self.replies
        if method == "step" and not all(reply.done() for reply in self.replies):
            self.queued_behind.set()
        return super().call(method, args, tensors)

    def close(self) -> None:
        for reply in self.replies:
            if not reply.done():
                reply.set_exception(EngineClosed("the ranks have ended"))
        super().close()


def test_no_step_begins_behind_a_call_that_ranks_are_still_at(start: Start) -> None:
    """Nor once its caller has given up: the step's own deadline would pass meanwhile."""
    ranks = LongCalls(2)
    ranks.halt_at = 5
    core, sink = start(ranks), Sink()
    core.submit([request(max_tokens=100)], sink, stream=True)
    deadline = time.monotonic() + 10
    while ranks.begun < 6:  # which stands still
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(core.call_between_steps, "collective_rpc", {}, "nap", 1.5)
        assert not ranks.asked.wait(0.1), "within a step"
        ranks.gate.set()
        assert ranks.asked.wait(10)
        ranks.replies[1].set_result(({}, {}))
        with pytest.raises(DeadlineExceeded, match=r"rank 0 did not answer .* 1.5 s \(phase: nap"):
            asked.result(10)
    assert not ranks.queued_behind.wait(0.2)
    with pytest.raises(DeadlineExceeded, match=r"no step boundary came .*phase: another"):
        core.call_between_steps("collective_rpc", {}, "another", 0.1)
    ranks.replies[0].set_result(({}, {}))
    assert len(sink.results()["a"].outputs[0].token_ids) == 100
    assert not ranks.queued_behind.is_set()
    assert core.state == "running"


def test_a_rank_that_hangs_in_a_step_is_noticed_within_the_timeout(start: Start) -> None:
    """Also where starting may take long: that was the first step's, and it has ended."""
    toy = ToyExecutor()
    core = start(toy, timeout=0.5, start_timeout=600.0)
    run(core, request(max_tokens=2))
    toy.gate.clear()
    sink = Sink()
    core.submit([request("b", max_tokens=4)], sink, stream=False)
    try:
        with pytest.raises(EngineBroken, match=r"rank 0 did not end a step within 0\.5 s"):
            sink.results()
    finally:
        toy.gate.set()
    assert core.state == "broken"


def test_a_step_of_more_tokens_than_any_before_may_take_longer(start: Start) -> None:
    toy = ToyExecutor()
    core = start(toy, timeout=0.2, start_timeout=600.0)
    run(core, request(prompt=PROMPT[:3], max_tokens=2))
    toy.gate.clear()
    sink = Sink()
    core.submit([request("b", prompt=[*PROMPT, *PROMPT], max_tokens=2)], sink, stream=False)
    time.sleep(0.6)
    toy.gate.set()
    assert sink.results()["b"].outputs[0].finish_reason == "length"
    assert core.state == "running"


def test_a_call_of_too_many_sequences_is_refused_before_any_is_made(start: Start) -> None:
    core = start(max_seqs_per_call=6, max_queued_requests=2)
    made = core.inputs._next_seq_id
    calls = [request(name, n=n, max_tokens=1) for name, n in (("a", 4), ("b", 3))]
    with pytest.raises(InvalidRequest, match=r"brings 7 .*prompts: 2.*_call is 6: split"):
        core.submit(calls, Sink(), stream=False)
    assert (core.inputs._next_seq_id, core.inputs.live_ids) == (made, set())
    sink = Sink()
    core.submit([request("a", n=6, max_tokens=1)], sink, stream=False)
    assert len(sink.results()["a"].outputs) == 6


def test_a_call_on_its_way_to_the_scheduler_is_counted_once(start: Start) -> None:
    """Two may wait, and one does: another that comes while it is handed over is let in."""
    core = start(max_queued_requests=2)
    core.control.pause("keep", 5.0).result()
    honest, refused = core.scheduler.add, []
    coming = threading.Event()

    def another() -> None:
        try:
            core.submit([request("b", max_tokens=1)], Sink(), stream=False)
        except EngineOverloaded as error:
            refused.append(error)
        coming.set()

    def add(samples: list[TokenSequence]) -> None:
        honest(samples)
        core.scheduler.add = honest
        threading.Thread(target=another).start()
        coming.wait(0.3)

    core.scheduler.add = add
    core.submit([request("a", max_tokens=1)], Sink(), stream=False)
    assert coming.wait(10)
    assert not refused
    with pytest.raises(EngineOverloaded):
        core.submit([request("c", max_tokens=1)], Sink(), stream=False)


def test_samples_of_one_call_share_what_they_ask_of_single_tokens(start: Start) -> None:
    """Arrays of many tokens, of many samples; and what penalties read goes when a sample ends."""
    core, added = start(), []
    honest = core.scheduler.add
    core.scheduler.add = lambda samples: (added.extend(samples), honest(samples))
    one = request("a", n=2, max_tokens=2, allowed_token_ids=[5, 6], presence_penalty=0.5)
    asked = [one, replace(one, request_id="b")]
    asked.append(request("c", max_tokens=2, min_tokens=1, stop_token_ids=(9,), ignore_eos=True))
    run(core, *asked)
    first, *others = (seq.token_edits for seq in added)
    assert first.allowed.tolist() == [5, 6]
    assert [one is first for one in others] == [True] * 3 + [False]
    assert others[-1].stops.tolist() == [9]
    assert all(seq._seen is None for seq in added)
