"""Where ranks lie, on which device, and in which environment; no cluster is needed for that."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch

from rollout.config import EngineConfig
from rollout.distributed import TensorParallel
from rollout.engine.executors import make_executor
from rollout.engine.executors.ray import _by_node, passed_on, ranks_held
from rollout.engine.worker import worker
from rollout.errors import ConfigError, EngineClosed


@pytest.mark.parametrize(
    ("nodes", "here", "places"),
    [
        ("a", "a", [(0, 0)]),
        ("ab", "a", [(0, 0), (1, 0)]),
        ("ba", "a", [(0, 0), (1, 0)]),
        ("abab", "b", [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("bbac", "a", [(0, 0), (1, 0), (1, 1), (2, 0)]),
        ("cbbb", "a", [(0, 0), (1, 0), (1, 1), (1, 2)]),  # none is on the engine's own
    ],
)
def test_ranks_of_one_node_are_neighbours_and_the_engines_own_is_first(nodes, here, places):
    """``nodes``: of each bundle. ``places``: by rank, the number of its node and its own there."""
    bundles = _by_node(nodes, here)
    assert sorted(bundles) == list(range(len(nodes)))
    of_rank = [nodes[bundle] for bundle in bundles]
    order = list(dict.fromkeys(of_rank))
    assert (here in nodes) == (order[0] == here)
    found = [(order.index(node), of_rank[:rank].count(node)) for rank, node in enumerate(of_rank)]
    assert found == places


@pytest.mark.parametrize(
    ("cards", "asked", "devices"),
    [
        (2, "cuda", ["cuda:0", "cuda:1"]),
        (8, "cuda", [f"cuda:{n}" for n in range(8)]),
        (1, "cuda", ["cuda:0", "cuda:0"]),  # they share it
        (2, "cuda:1", ["cuda:1", "cuda:1"]),
        (0, "cpu", ["cpu", "cpu"]),
    ],
)
def test_each_rank_of_a_machine_has_a_card_of_its_own(cards, asked, devices, monkeypatch):
    """Where the executor has no node but its own; Ray shows a rank its card as number 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    found = [str(worker._own_device(torch.device(asked), rank)) for rank in range(len(devices))]
    assert found == devices


def test_settings_of_collectives_reach_ranks_on_other_nodes_and_no_others(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "TP_SOCKET_", "OMP_")):
            monkeypatch.delenv(name)
    ours = passed_on()
    assert ours == {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    given = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    given |= {"OMP_WAIT_POLICY": "ACTIVE"}
    given |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # who says so means it
    other = {"NCCL_ASYNC_ERROR_HANDLING": "1", "ROLLOUT_TOKEN": "a-secret", "HF_TOKEN": "a-secret"}
    for name, value in (given | other).items():
        monkeypatch.setenv(name, value)
    assert passed_on() == {**ours, **given}


@pytest.mark.parametrize(
    ("nodes", "bundle", "held"),
    [
        ([{"GPU": 1.0, "CPU": 8.0}, {"GPU": 1.0, "CPU": 1.0}], {"GPU": 1.0, "CPU": 1.0}, 2),
        ([{"GPU": 8.0, "CPU": 4.0}], {"GPU": 1.0, "CPU": 1.0}, 4),
        ([{"CPU": 3.0}, {"CPU": 3.0}], {"CPU": 2.0}, 2),  # none is cut in two
        ([{"CPU": 8.0}], {"GPU": 1.0, "CPU": 1.0}, 0),
        ([], {"CPU": 1.0}, 0),
    ],
)
def test_a_cluster_holds_so_many_ranks_at_most(nodes, bundle, held):
    assert ranks_held(nodes, bundle) == held


def test_a_rank_has_its_device_before_its_group_and_both_before_its_model(tiny, monkeypatch):
    """Its environment comes before all that: the process has it when it starts."""
    happened = []

    def built(*given):
        happened.append("model")
        raise EngineClosed("that was all")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: happened.append(str(device)))
    monkeypatch.setattr(worker, "check_dtype", lambda *_: happened.append("dtype"))
    monkeypatch.setattr(worker.Worker, "_join", lambda *_: happened.append("group"))
    monkeypatch.setattr(worker, "ModelRunner", built)
    config, tp = EngineConfig(model=str(tiny[0])), TensorParallel(1, 2)
    rank = worker.Worker(config, tp, device=torch.device("cuda", 1))
    for ranks in ([0], [0, 1]):  # others load first
        with suppress(EngineClosed):
            rank.start({"rendezvous": {}, "ranks": ranks})
    assert happened == ["cuda:1", "dtype", "group", "cuda:1", "dtype", "group", "model"]


@pytest.mark.parametrize("name", ["ray_address", "ray_placement_group"])
@pytest.mark.parametrize("executor", ["auto", "inline", "multiprocess"])
def test_settings_of_ray_are_refused_where_ranks_do_not_run_there(name, executor):
    with pytest.raises(ConfigError, match=f"{name}='x' is of executor='ray' alone"):
        make_executor(EngineConfig(model="m", executor=executor, **{name: "x"}))
    made = make_executor(EngineConfig(model="m", executor="ray", **{name: "x"}))  # asks nobody yet
    made.close()
