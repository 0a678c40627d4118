"""Several components under one vote: what an engine does not have is refused by its name."""

from __future__ import annotations

import pytest
import torch
from engine_ranks import Engine, same
from manual_update import ManualUpdate
from trainer import Trainer

from rollout.errors import ConfigError, WeightMismatch
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights import TensorMeta
from rollout.weights.components import component_of, qualified


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 1, checkpoints[1])
    yield engine
    engine.close()


def test_the_policy_alone_is_an_update_like_any_other(engine, checkpoints) -> None:
    assert engine.info().components == ("policy",)
    receipt = Trainer(engine, "inline").send({"policy": checkpoints[2]})
    assert receipt.num_tensors == len(engine.info().tensors)
    Trainer(engine, "inline").send(checkpoints[2])
    live = engine.live()
    Trainer(engine, "inline").send({"policy": iter(checkpoints[2].items())})
    assert same(engine.live(), live)


@pytest.mark.parametrize("known", [True, False], ids=["metadata", "as they come"])
def test_an_engine_refuses_components_that_it_has_not_by_name(engine, checkpoints, known) -> None:
    before = engine.live()
    draft = qualified("draft", "model.norm.weight")
    assert (draft, component_of(draft)) == ("draft:model.norm.weight", "draft")
    weights = {**checkpoints[2], draft: torch.ones(3)}
    metadata = tuple(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in weights.items())
    update = ManualUpdate(engine, weights, metadata=metadata if known else None)
    with pytest.raises(WeightMismatch, match="draft"):
        update.send_all()
    update.channel.close()
    assert same(engine.live(), before)


def test_a_sender_of_a_component_is_told_before_anything_is_sent(engine, checkpoints) -> None:
    version = engine.version
    sent = {"policy": checkpoints[2], "draft": checkpoints[1]}
    with pytest.raises(WeightMismatch, match=r"no component 'draft': it has policy"):
        Trainer(engine, "inline").send(sent)
    assert engine.version == version
    with pytest.raises(ConfigError, match="sender of draft"):  # were there an engine that has it
        detect(sent).source(aliases={}, dtype=torch.float32, components=("policy", "draft"))


def test_a_tensor_that_is_called_policy_is_a_tensor() -> None:
    assert detect({"policy": torch.ones(3)}).others == ()
