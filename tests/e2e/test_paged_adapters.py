"""More adapters than slots on the device: the others wait in host memory until they are named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import adapted
from tiny_models import write_tiny
from transformers import AutoModelForCausalLM

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.engine.adapters.places import AdapterPlaces
from rollout.engine.updates.live_weights import live_adapters
from rollout.errors import ConfigError, WeightMismatch
from rollout.models.adapters.instance import InstanceAdapters
from rollout.models.adapters.linear import ActiveRows, LinearAdapters
from rollout.weights import Box, WeightSlot
from rollout.weights.adapters import DORA, AdapterSpec, ModuleSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.usefixtures("forked_ranks"),
]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"use_dora": True},
    "biased": {"lora_bias": True, "target_modules": ["k_proj", "o_proj"]},
    "few": {"r": 2, "target_modules": ["up_proj"]},
}
PROMPT = list(range(3, 40))
SETTINGS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 96, "block_size": 8, "timeout": 30,
    "max_adapters": 2, "max_cpu_loras": 10, "max_lora_rank": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "checkpoint"
    write_tiny(path, "qwen2")
    return path


@pytest.fixture(scope="module")
def models(base) -> dict[str, Any]:
    found = enumerate(KINDS.items())
    return {name: adapted(base, 60 + seed, **of).eval() for seed, (name, of) in found}


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.more)], ids=["tp1", "tp2"]
)
def engine(request, base, models) -> Iterator[Rollout]:
    with Rollout(base, tensor_parallel_size=request.param, **SETTINGS) as rollout:
        for name, model in models.items():
            rollout.update_weights(adapters={name: model})
        yield rollout


def said(rollout: Rollout, names: list[str | None], tokens: int = 6) -> list[Any]:
    rollout.reset_prefix_cache()
    params = [
        SamplingParams(adapter=name, temperature=0, max_tokens=tokens, ignore_eos=True)
        for name in names
    ]
    return [output.outputs[0] for output in rollout.generate([PROMPT] * len(names), params)]


def check(completion: Any, model: Any) -> None:
    tokens = [*PROMPT, *completion.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    wanted = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    assert wanted.argmax(-1).tolist() == completion.token_ids
    got = torch.tensor(completion.logprobs.raw)
    torch.testing.assert_close(got, wanted.max(-1).values, rtol=1e-4, atol=1e-4)


def test_each_answers_as_pefts_model_alone_and_in_one_call_of_all(engine, base, models) -> None:
    alone = {name: said(engine, [name])[0] for _ in range(2) for name in (*models, *models)}
    for name, completion in alone.items():
        check(completion, models[name])
    names = [*models, None, *models]  # more than lie on the device: some wait for others to end
    for name, completion in zip(names, said(engine, names), strict=True):
        check(completion, models[name] if name else AutoModelForCausalLM.from_pretrained(base))
        if name:
            assert completion.adapter == alone[name].adapter


def test_an_update_and_a_rollback_find_versions_that_had_been_moved_out(
    engine, base, models
) -> None:
    before = said(engine, ["plain"])[0]
    other = adapted(base, 70).eval()
    engine.update_weights(adapters={"plain": other})
    for name in ("normed", "biased", "few"):
        check(said(engine, [name])[0], models[name])
    check(said(engine, ["plain"])[0], other)
    engine.rollback()
    again = said(engine, ["plain"])[0]
    assert (again.adapter, again.logprobs.raw) == (before.adapter, before.logprobs.raw)
    # Norms are those of the base below them, also of what is not on the device.
    said(engine, ["plain", "few"])
    grown = adapted(base, 61, **KINDS["normed"]).eval()
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            if "base_layer.weight" in name:
                parameter *= torch.linspace(1.0, 1.5, parameter.shape[1])
    with grown.disable_adapter():
        engine.update_weights(grown)
    check(said(engine, ["normed"])[0], grown)
    engine.rollback()
    check(said(engine, ["normed"])[0], models["normed"])


def test_an_update_beside_running_requests_that_hold_all_places_is_staged_in_host_memory(
    engine, base, models
) -> None:
    before = {name: said(engine, [name])[0].token_ids for name in ("plain", "few")}
    params = [
        SamplingParams(adapter=name, temperature=0, max_tokens=300, ignore_eos=True)
        for name in ("plain", "few")
    ]
    streams = [engine.stream(PROMPT, each) for each in params]
    for stream in streams:
        next(stream)
    engine.pause_generation(mode="keep")
    assert len(engine._async.backend.core.scheduler.running) == 2
    bad = adapted(base, 71, **KINDS["normed"]).eval()
    with torch.no_grad():
        next(p for n, p in bad.named_parameters() if "lora_B" in n)[0, 0] = torch.nan
    with pytest.raises(WeightMismatch, match="lora_B"):
        engine.update_weights(adapters={"normed": bad})
    other = adapted(base, 72, **KINDS["normed"]).eval()
    sent = engine.update_weights(adapters={"normed": other})
    engine.resume_generation()
    for stream, name in zip(streams, ("plain", "few"), strict=True):
        *_, last = stream
        assert last.outputs[0].token_ids[:6] == before[name]
    check(said(engine, ["normed"])[0], other)
    assert engine.update_weights(adapters={"normed": other}).adapters["normed"].digest == (
        sent.adapters["normed"].digest
    )
    engine.update_weights(adapters={name: models[name] for name in KINDS})  # more than places
    for name in KINDS:
        check(said(engine, [name])[0], models[name])


def test_an_update_that_has_begun_takes_no_place_from_requests(engine, models) -> None:
    updates = engine._async.backend.coordinator.adapters
    slots = updates.reserve(["one", "two"], 30, time.monotonic(), lambda: None)
    try:
        for name, completion in zip(models, said(engine, [*models]), strict=True):
            check(completion, models[name])
    finally:
        updates.release(slots)


def test_all_that_is_held_can_be_read_wherever_it_lies(engine, models) -> None:
    """As a member of a fleet is given it that joins."""
    engine.update_weights(adapters=dict(models))
    coordinator = engine._async.backend.coordinator
    brought = coordinator.engine.places.brought
    for _ in range(2):
        found = live_adapters(coordinator, list(models), 30)
        for name, model in models.items():
            named = dict(model.named_parameters())
            assert found[name].tensors
            for key, tensor in found[name].tensors.items():
                stem, _, leaf = key.rpartition(".")
                own = f"{stem}.default.{leaf}"
                if leaf == "lora_magnitude_vector":
                    own = f"{key}.default.weight"
                assert torch.equal(tensor, named[f"base_model.model.{own}"]), key
        said(engine, ["few", "plain", "normed"])
    assert coordinator.engine.places.brought > brought


def test_places_go_to_what_is_named_and_come_back_when_a_move_fails() -> None:
    held, told = {3}, []
    places = AdapterPlaces(2, lambda: held, told.append)
    first, second = places.bring(3), places.bring(4)
    assert {first, second} == {0, 1}
    assert places.bring(3) == first  # used last now, and held
    assert places.bring(5) == second
    held.add(5)
    assert places.bring(4) is None
    places.tell()
    assert told == [[(3, first), (4, second), (5, second)]]
    assert places.brought == 3

    def fails(moves: list[Any]) -> None:
        raise MemoryError

    broken = AdapterPlaces(1, lambda: (), fails)
    for _ in range(2):
        assert broken.bring(7) == 0
        with pytest.raises(MemoryError):
            broken.tell()
    assert broken.brought == 2  # it is asked for anew


def test_norms_are_derived_beside_a_step_that_brings_another_adapter() -> None:
    part = WeightSlot("x.weight", (2, 3), Box.full((2, 3)), "x.weight", Box.full((2, 3)))
    dora = {0: (1, AdapterSpec(modules={"x": ModuleSpec(rank=1, scaling=1.0, kind=DORA)}))}

    class Moving(LinearAdapters):
        def weight(self, model: Any, part: WeightSlot) -> torch.Tensor:
            dora.clear()
            return torch.ones(2, 3)

    active = ActiveRows()
    linear = Moving([[part], [part]], torch.ones(1, 2, 1, 3), torch.ones(1, 1, 4), active, False)
    own: Any = InstanceAdapters(active, None, {"x": linear, "y": linear}, dora, {0}, print, 0)
    own.derive(None)
    assert own._squares[0][0] == 1  # of the load that it was, which no step takes for another


def test_there_is_room_for_as_many_as_were_asked_for(engine, base, models) -> None:
    more = [f"more_{i}" for i in range(6)]
    for name in more:
        engine.update_weights(adapters={name: models["few"]})
    with pytest.raises(ConfigError, match=r"10 of 10 hold .*max_cpu_loras=11"):
        engine.update_weights(adapters={"seventh": models["few"]})
    for name in more:
        check(said(engine, [name])[0], models["few"])
        assert engine.unload_lora_adapter(name)
    for wrong in ({"max_adapters": 2, "max_cpu_loras": 1}, {"max_cpu_loras": 3}):
        slots = wrong.get("max_adapters", 0)
        with pytest.raises(ConfigError, match=rf"max_adapters={slots}: .* set it to max_adapters"):
            EngineConfig(model=str(base), **wrong)
