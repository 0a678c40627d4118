"""Whatever one request brings, it is refused by name or runs, and its neighbour never notices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_core.harness import PROMPT, Sink, Start, request, run
from engine_core.toy_model import Reply, ToyExecutor, continuation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sequences.sequence import Sequence
from rollout.errors import EngineError, InvalidRequest
from rollout.generation import Completion, Request, SamplingParams
from rollout.generation.sampling_params import GREEDY_BELOW, MAX_BIAS

VOCAB = 320
NEIGHBOUR = {"max_tokens": 3, "seed": 5, "logprobs": 2}

numbers = st.one_of(
    st.floats(),
    st.floats(0, 2),
    st.sampled_from([0, 1, 1e-6, 1e6, 1e9, 1e30, 5e-324, 10**400, -1.0, True, None, "1"]),
)
counts = st.one_of(
    st.none(),
    st.integers(-2, 8),
    st.integers(),
    st.sampled_from(
        [VOCAB, VOCAB + 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**4000]
    ),
    st.booleans(),
    st.floats(),
)
ids = st.one_of(st.integers(-1, VOCAB), st.integers(0, VOCAB - 1), counts)
flags = st.one_of(st.booleans(), st.sampled_from([None, 0, 1, "no"]))
FIELDS = {
    "n": st.one_of(st.integers(0, 4), st.sampled_from([16385, 10**30, True, 1.5])),
    **dict.fromkeys(
        (
            *("temperature", "top_p", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty"),
        ),
        numbers,
    ),
    **dict.fromkeys(("top_k", "seed", "logprobs", "prompt_logprobs", "min_tokens"), counts),
    "max_tokens": st.one_of(st.integers(1, 5), counts),
    "logit_bias": st.one_of(
        st.none(),
        st.dictionaries(ids, numbers, max_size=5),
        st.just(dict.fromkeys(range(2000), 1.0)),
        st.just(7),
    ),
    "stop": st.one_of(
        st.text(max_size=3),
        st.lists(st.text(max_size=3), max_size=4),
        st.just(("x",) * 300),
        st.just("y" * 5000),
        st.just(3),
    ),
    "stop_token_ids": st.one_of(st.lists(ids, max_size=5), st.just([1] * 2000), st.just(2)),
    **dict.fromkeys(
        ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"), flags
    ),
}
some_fields = st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    st.lists(st.one_of(st.integers(), st.integers(-1, VOCAB), st.booleans()), max_size=4),
)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    """Deterministic, so that a neighbour's bits may be compared."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, tokenizer=True)
    config = EngineConfig(
        model=str(path), device="cpu", num_threads=1, num_kv_blocks=64, block_size=8,
        max_model_len=48, deterministic=True,
    )  # fmt: skip
    made = EngineCore(config)
    made.start()
    yield made
    made.close()


def test_any_request_is_refused_or_ends_and_its_neighbour_is_untouched(core: EngineCore) -> None:
    names = (f"n{i}" for i in itertools.count())
    alone = run(core, request("alone", **NEIGHBOUR))["alone"].outputs[0]
    ran = refused = 0

    @settings(
        max_examples=160, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(some_fields, prompts)
    def check(fields: dict[str, object], prompt: list[int]) -> None:
        nonlocal ran, refused
        beside, odd = next(names), next(names)
        first, second = Sink(), Sink()
        core.submit([request(beside, **NEIGHBOUR)], first, stream=False)
        try:
            params = SamplingParams.from_dict({"max_tokens": 4, **fields})
            core.submit(
                [Request(request_id=odd, prompt_token_ids=tuple(prompt), params=params)],
                second,
                stream=True,
            )
        except InvalidRequest as error:
            refused += len(str(error)) < 1000
        else:
            assert second.results()[odd].finished
            ran += 1
        assert bits(first.results()[beside].outputs[0]) == bits(alone)

    check()
    assert ran > 10
    assert refused > 10
    assert core.stats().requests_finished["error"] == 0


def bits(sample: Completion) -> tuple[object, ...]:
    return sample.token_ids, sample.logprobs


def test_settings_alone_give_no_logits_that_are_no_numbers(core: EngineCore) -> None:
    """They would look like weights that diverged."""
    only = {"allowed_token_ids": (2,), "stop_token_ids": (2, 3), "min_tokens": 2}
    with pytest.raises(InvalidRequest, match="all of allowed_token_ids end an answer"):
        run(core, request("a", max_tokens=4, **only))
    steep = {"logit_bias": {5: MAX_BIAS}, "repetition_penalty": 1e-6, "temperature": GREEDY_BELOW}
    ended = run(core, request("b", [5, 6], max_tokens=4, **steep))["b"].outputs[0]
    assert ended.finish_reason in ("length", "stop")
    assert core.stats().nan_logits_total == 0


def test_what_cannot_be_encoded_ends_its_own_request_alone(start: Start) -> None:
    """Past admission, where no such value comes: whatever the fault, the step goes on."""
    core = start(ToyExecutor())
    good, bad, later = Sink(), Sink(), Sink()
    broken = request("bad", max_tokens=40)
    core.control.pause().result()
    core.submit([request("good", max_tokens=30)], good, stream=False)
    core.submit([broken], bad, stream=False)
    object.__setattr__(broken.params, "top_k", 10**30)
    core.control.resume().result()
    with pytest.raises(EngineError, match="'bad' cannot be encoded: OverflowError"):
        bad.results()
    assert good.results()["good"].outputs[0].token_ids == continuation(PROMPT, 30)
    core.submit([request("bad", max_tokens=3)], later, stream=False)
    assert later.results()["bad"].outputs[0].token_ids == continuation(PROMPT, 3)
    assert core.blocks.num_free == core.num_kv_blocks
    assert core.stats().requests_finished == {"stop": 0, "length": 2, "abort": 0, "error": 1}


def test_a_request_that_becomes_unencodable_while_it_runs_ends_alone(start: Start) -> None:
    core = start(ToyExecutor())
    good, bad = Sink(), Sink()
    broken = request("bad", n=3, max_tokens=100)
    core.submit([request("good", max_tokens=60)], good, stream=True)
    core.submit([broken], bad, stream=True)
    bad.wait_for(3)
    core.at_step_boundary(lambda: object.__setattr__(broken.params, "top_k", 10**30)).result(30)
    with pytest.raises(EngineError, match="cannot be encoded"):
        bad.results()
    assert good.results()["good"].outputs[0].token_ids == continuation(PROMPT, 60)
    assert core.blocks.num_free == core.num_kv_blocks


def test_text_that_cannot_be_made_ends_its_own_request_alone(start: Start) -> None:
    core = start(tokenizer=True)
    good, bad = Sink(), Sink()
    core.submit([request("good", max_tokens=12)], good, stream=True)
    core.control.pause().result()
    core.submit([request("bad", n=2, max_tokens=12)], bad, stream=True)

    def spoil() -> None:
        for sample in core.outputs.requests["bad"].samples:
            sample.text._tokenizer = None

    core.at_step_boundary(spoil).result(30)
    core.control.resume().result()
    with pytest.raises(EngineError, match="'bad' failed: AttributeError"):
        bad.results()
    assert len(good.results()["good"].outputs[0].token_ids) == 12
    assert core.blocks.num_free == core.num_kv_blocks


class NotANumberAt(ToyExecutor):
    """Gives NaN for the token at one position."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position

    def _reply(self, states: list[int], sampling: SamplingMetadata, version: int) -> Reply:
        header, out = super()._reply(states, sampling, version)
        for row in np.flatnonzero(sampling.counters == self.position):
            out["raw"][row] = math.nan
        return header, out


def test_a_sample_ends_by_name_where_its_logits_are_no_numbers(start: Start) -> None:
    core = start(NotANumberAt(len(PROMPT) + 5))
    outs = run(
        core,
        request("long", max_tokens=20),
        request("short", max_tokens=5),
        request("ahead", [*PROMPT, *continuation(PROMPT, 8)], max_tokens=5),
    )
    samples = {name: out.outputs[0] for name, out in outs.items()}
    ends = {name: (sample.finish_reason, sample.stop_reason) for name, sample in samples.items()}
    assert ends == {
        "long": ("error", "nan_logits"), "short": ("length", None), "ahead": ("length", None)
    }  # fmt: skip
    assert outs["long"].outputs[0].token_ids == continuation(PROMPT, 5)
    stats = core.stats()
    assert (stats.nan_logits_total, stats.generation_tokens_total) == (1, 15)
    assert core.blocks.num_free == core.num_kv_blocks


class OneTooSlow:
    """Of each step's grammars the first takes too long, and the others have come to their end."""

    def __init__(self) -> None:
        self.followed, self._asked = self, []

    def ask(self, sequences: list[Sequence]) -> list[Sequence]:
        self._asked = sequences
        return sequences

    def wait(self, sequences: list[Sequence], seconds: float) -> None:
        """All are answered."""

    def take(self) -> list[tuple[Sequence, Exception | None]]:
        slow = InvalidRequest("too ambiguous")
        return [(sequence, None if row else slow) for row, sequence in enumerate(self._asked)]


def test_a_sample_whose_grammar_fails_beside_one_that_ends_costs_its_own_call_alone(
    start: Start,
) -> None:
    core = start(tokenizer=True)
    core.loop._grammars = OneTooSlow()
    good, bad = Sink(), Sink()
    core.control.pause().result()
    core.submit([request("good", max_tokens=12)], good, stream=False)
    bound = {"structured_outputs": {"choice": ["a"]}}
    core.submit([request(name, **bound) for name in ("bad", "beside")], bad, stream=False)
    core.control.resume().result()
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        bad.results()
    assert len(good.results()["good"].outputs[0].token_ids) == 12
    assert core.blocks.num_free == core.num_kv_blocks


def test_bad_words_are_tokenised_once_a_call_and_not_by_the_engines_thread(start: Start) -> None:
    core = start(tokenizer=True)
    honest, threads = core.tokenizer.encode, []

    def encode(text: str, **options: bool) -> list[int]:
        threads.append(core.loop.is_current_thread)
        return honest(text, **options)

    core.tokenizer.encode = encode
    run(core, request("a", n=8, max_tokens=2, bad_words=["dog", "a b"]))
    assert threads == [False] * 4  # each within a text, and after a space


def test_integers_are_pythons_numpys_or_torchs() -> None:
    asked = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        seed=torch.tensor(5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
    )
    assert asked == SamplingParams(max_tokens=3, seed=5, stop_token_ids=(1, 2))
    kept = (asked.max_tokens, asked.seed, *asked.stop_token_ids)
    assert all(type(number) is int for number in kept)  # what goes over a wire
    with pytest.raises(InvalidRequest, match=r"max_tokens must be an integer, or None, got 4\.0"):
        SamplingParams(max_tokens=4.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"n must be an integer, got np\.float64\(4\.0\)"):
        SamplingParams(n=np.float64(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [list, np.array, torch.tensor])
def test_a_mask_over_the_vocabulary_is_not_taken_for_tokens(of) -> None:
    for name in ("allowed_token_ids", "stop_token_ids"):
        with pytest.raises(InvalidRequest, match=f"{name} must be integers"):
            SamplingParams.from_dict({name: of([False, True, True])})


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_a_mapping_is_not_taken_for_a_list_of_its_keys(name: str) -> None:
    keys = {"a": 1} if name in ("stop", "bad_words") else {3: 1.0}
    with pytest.raises(InvalidRequest, match=f"{name} must be a list, got {{"):
        SamplingParams.from_dict({name: keys})
    with pytest.raises(InvalidRequest, match=f"{name} must be a list, got b'12'"):
        SamplingParams.from_dict({name: b"12"})
