"""Several components under one vote: all change at one commit, or none does."""

from __future__ import annotations

import pytest
import torch
from engine_ranks import Engine, same
from manual_update import ManualUpdate
from trainer import Trainer, nudged
from trainer_ranks import Boxes, TrainerRanks, agreements

from rollout.errors import ConfigError, IncompleteUpdate, WeightMismatch
from rollout.weight_sync.protocol.messages import UpdateRequest
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


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("policy", "draft"), "no component 'draft': it has policy; leave the others out"),
        (
            ("model", "optimizer"),
            "no component 'model', 'optimizer': it has policy; if 'model' is the policy, pass it "
            "by itself or name it 'policy'; ",
        ),
    ],
)
def test_a_sender_of_a_component_is_told_before_anything_is_sent(
    engine, checkpoints, names, says
) -> None:
    version = engine.version
    with pytest.raises(WeightMismatch, match=says):
        Trainer(engine, "inline").send(dict.fromkeys(names, checkpoints[2]))
    assert engine.version == version


def test_an_update_of_no_component_is_refused(engine, checkpoints) -> None:
    version = engine.version
    request = UpdateRequest(
        update_id="of-nothing", bucket_bytes=1 << 20, timeout=5.0, components=()
    )
    with pytest.raises(ConfigError, match="of one component at least"):
        engine.open().begin(request)
    assert (engine.version, engine.info().state) == (version, "idle")


@pytest.mark.parametrize(
    ("components", "builds"),
    [(("policy",), False), (("value",), True), (("adapter/math",), True)],
)
def test_what_leaves_the_policy_as_it_is_builds_on_it(components, builds) -> None:
    """A client then makes sure that it is the policy of the engine that it knows."""
    request = UpdateRequest(update_id="u", bucket_bytes=1, timeout=5.0, components=components)
    assert request.builds_on_live is builds


def test_a_tensor_that_is_called_policy_is_a_tensor() -> None:
    assert detect({"policy": torch.ones(3)}).components == ("policy",)
    assert detect({"policy": torch.ones(3)}).kind == "plain"


def test_a_component_is_a_source_and_no_dict_of_components() -> None:
    weights = {"w": torch.ones(3)}
    assert detect({"policy": weights, "draft": weights.items()}).components == ("policy", "draft")
    with pytest.raises(ConfigError, match=r"component 'draft' is .* again"):
        detect({"policy": weights, "draft": {"policy": weights}})


@pytest.fixture(scope="module", params=["none", "int8"])
def scheme(request) -> str:
    """How the policy's linears are held; a draft's are as they come."""
    return request.param


def started(checkpoints, scheme, policy, draft) -> Engine:
    beside = {"draft": draft}
    return Engine(checkpoints[0], 2, policy, "tiles", beside=beside, quantization=scheme)


@pytest.fixture(scope="module")
def pair(checkpoints, scheme):
    """An engine of a policy and a draft, which begin alike."""
    engine = started(checkpoints, scheme, checkpoints[1], checkpoints[1])
    yield engine
    engine.close()


def test_slots_of_all_components_are_digested_together_as_one_by_one(pair) -> None:
    """Together is how a device reads them."""
    for rank in pair.ranks:
        model = rank.instances.live
        every = [slot for found in model.table.slots.values() for slot in found]
        slots = [slot for slot in every if slot not in model.table.quantized]  # read one by one
        assert {component_of(slot.source) for slot in slots} == {"policy", "draft"}
        assert [value for value, _ in model.digest_slots(slots)] == list(
            map(model.digest_slot, slots)
        )


def held(engine):
    """The tensors of all components, as their ranks' digests say."""
    return engine.digests(10.0)


@pytest.mark.parametrize("transport", ["inline", "ipc", "broadcast"])
@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_all_components_change_at_one_commit(
    pair, scheme, checkpoints, transport, encoding
) -> None:
    policy, draft = nudged(checkpoints[1], 0.02, 3), nudged(checkpoints[1], 0.02, 4)
    trainer = Trainer(pair, transport)
    trainer.send({"policy": checkpoints[1], "draft": checkpoints[1]}, encoding=encoding)
    receipt = trainer.send({"policy": policy, "draft": draft}, encoding=encoding)
    assert receipt.details["encoding"] == encoding
    parts = receipt.components
    assert set(parts) == {"policy", "draft"}
    assert sum(one.num_tensors for one in parts.values()) == receipt.num_tensors
    assert sum(one.digest for one in parts.values()) % 2**64 == receipt.digest
    whole = started(checkpoints, scheme, policy, draft)
    assert held(whole) == held(pair)
    assert same(whole.live(), pair.live())
    whole.close()


def test_what_is_wrong_with_one_component_leaves_both(pair, checkpoints) -> None:
    before, version = pair.live(), pair.version
    short = dict(checkpoints[2])
    short.pop("model.norm.weight")
    trainer = Trainer(pair, "inline")
    for draft, match in (
        (short, r"draft:model\.norm\.weight is missing"),
        (iter(short.items()), r"draft:model\.norm\.weight"),  # found out at the seal
        ({**checkpoints[2], "x": torch.ones(3)}, "draft:x is unknown"),
    ):
        with pytest.raises((WeightMismatch, IncompleteUpdate), match=match):
            trainer.send({"policy": checkpoints[2], "draft": draft})
        assert pair.version == version
        assert same(pair.live(), before)


def test_what_is_not_named_stays_as_it_is(pair, scheme, checkpoints) -> None:
    """And going back brings back all of it."""
    trainer = Trainer(pair, "inline")
    trainer.send({"policy": checkpoints[1], "draft": checkpoints[2]})
    first = pair.live()
    assert set(trainer.send(checkpoints[2]).components) == {"policy"}
    want = started(checkpoints, scheme, checkpoints[2], checkpoints[1])
    for staging in ("auto", "none"):
        assert set(trainer.send({"draft": checkpoints[1]}, staging=staging).components) == {"draft"}
        assert same(pair.live(), want.live())
        assert held(pair) == held(want)
    want.close()
    trainer.send({"policy": checkpoints[1], "draft": checkpoints[2]})
    assert same(pair.live(), first)


def test_a_policy_whose_ranks_send_their_own_boxes_goes_alone(pair, checkpoints) -> None:
    live = TrainerRanks(pair, 2).send(checkpoints[2])
    assert all(receipt == live[0] for receipt in live)
    assert set(live[0].components) == {"policy"}


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_a_policys_source_may_tell_a_component_of_its_own_beside_others(
    checkpoints, transport
) -> None:
    """Read from two ranks where they hold it; the third component is the first rank's to send."""
    old = checkpoints[1]
    policy, head, draft = (nudged(old, 0.5, seed) for seed in (5, 6, 7))
    told = policy | {qualified("head", name): tensor for name, tensor in head.items()}

    def beside(_, source):
        source.components = ("policy", "head")
        return {"draft": draft, "policy": source}

    engine = Engine(checkpoints[0], 2, old, beside={"draft": old, "head": old})
    got = TrainerRanks(engine, 2).send(told, transport=transport, prepare=beside)
    assert all(receipt == got[0] for receipt in got)
    assert set(got[0].components) == {"draft", "policy", "head"}
    want = Engine(checkpoints[0], 2, policy, beside={"draft": draft, "head": head})
    assert same(engine.live(), want.live())
    for one in (engine, want):
        one.close()


def test_two_models_of_other_ranks_are_no_components_of_one_update(checkpoints) -> None:
    one, two = agreements(2), agreements(3)
    with pytest.raises(ConfigError, match=r"'policy' by ranks \[0, 1\] and 'draft' by ranks"):
        detect({"policy": Boxes(checkpoints[1], one[0]), "draft": Boxes(checkpoints[1], two[0])})
    for group in (*one, *two):
        group.close()
