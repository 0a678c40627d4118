"""The coordinator's own code among members, clocks, disks and a network that fail."""

import random
import runpy
from pathlib import Path

import pytest

from rollout.errors import RolloutError
from rollout.fleet.simulation.findings import Violation, Weather
from rollout.fleet.simulation.simulated_member import SimulatedMember
from rollout.fleet.simulation.simulator import Simulation


def course(seed: int, updates: int, faults: int):
    draw = random.Random(seed)
    members = draw.choice([1, 2, 3, 4, 5, 8])
    weather = Weather(
        delay=draw.choice([0.001, 0.01, 0.1]), loss=draw.choice([0.0, 0.01, 0.1]),
        stage=draw.choice([0.05, 0.5]), disk=draw.choice([0.002, 0.2]),
    )  # fmt: skip
    simulation = Simulation(
        members=members, seed=seed, quorum=min(members, draw.choice([1, 2])), weather=weather,
        fault_rate=draw.choice([0.2, 0.5, 1.0, 3.0]),
    )  # fmt: skip
    return simulation, simulation.run(updates, faults)


@pytest.mark.parametrize("seed", range(12))
def test_no_course_breaks_a_promise(seed):
    _, found = course(seed, 30, 50)
    assert found.commits + found.aborts == 30


@pytest.mark.more
def test_no_long_course_breaks_a_promise():
    commits = sum(course(seed, 60, 100)[1].commits for seed in range(1000, 1060))
    assert commits > 1500


@pytest.mark.more
def test_64_members_and_a_thousand_updates():
    weather = Weather(loss=0.01)
    found = Simulation(members=64, seed=7, weather=weather, fault_rate=1.0).run(1000, 1000)
    assert found.commits > 800
    assert found.refounded == 0  # never all of 64 at once


def test_a_course_ends_after_the_update_that_is_its_last_and_comes_to_rest():
    simulation = Simulation(members=4, seed=1, fault_rate=1.0)
    found = simulation.run(20, 20, over=lambda: True)
    assert found.commits + found.aborts == 1
    assert simulation.coordinator.serving == ["m0", "m1", "m2", "m3"]


def test_faults_befall_members_or_what_all_depend_on_in_the_share_that_is_asked_for():
    def course(share):
        simulation = Simulation(members=8, seed=5, fault_rate=2.0, of_all=share)
        assert simulation.run(20, 200).faults > 20
        return simulation

    members_alone, others_alone = course(0.0), course(1.0)
    assert members_alone.life == 1 < others_alone.life
    assert max(engine.epoch for engine in members_alone.engines.values()) > 8
    assert max(engine.epoch for engine in others_alone.engines.values()) == 8


@pytest.mark.more
def test_a_curve_is_drawn_over_sizes(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "simulated_fleets.py"
    found = {members: Simulation(members=members, seed=1).run(5, 0) for members in (4, 8)}
    rows = [{"members": members, **one.row()} for members, one in found.items()]
    curve = tmp_path / "new" / "curve.png"
    runpy.run_path(str(script))["draw"](rows, curve)
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_without_faults_everything_commits_and_nobody_is_refused():
    found = Simulation(members=4, seed=1).run(20, 0)
    assert (found.commits, found.aborts) == (20, 0)
    assert max(found.skew) < 0.1


def test_a_member_that_refuses_what_it_is_sent_is_tried_ever_less_often(monkeypatch):
    simulation, tries = Simulation(members=4, seed=3), []
    fill = SimulatedMember.fill

    def refuse(self, donor, version):
        tries.append(simulation.now)
        if simulation.now < 60:
            raise RolloutError("its disk is full")
        fill(self, donor, version)

    monkeypatch.setattr(SimulatedMember, "fill", refuse)
    simulation.pass_time(5.0)
    simulation.engines["m3"].cut = True
    simulation.update()
    simulation.pass_time(5.0)
    assert simulation.found.commits == 1
    simulation.engines["m3"].cut = False
    simulation.pass_time(50.0)
    assert 4 < len(tries) < 15
    simulation.rest()
    assert simulation.coordinator.serving == ["m0", "m1", "m2", "m3"]


def test_the_simulator_sees_a_broken_promise(monkeypatch):
    """A coordinator that answers commits without waiting for leases is found out."""
    from rollout.fleet.coordination.actions import Ended
    from rollout.fleet.coordination.coordinator import Coordinator

    def hasty(self, now):
        update = self.update
        if update is None or update.phase != "committing":
            return []
        self.update = None
        return [Ended(update.update_id, True)]

    monkeypatch.setattr(Coordinator, "_settle", hasty)

    def courses():
        for seed in range(20):
            course(seed, 30, 50)

    with pytest.raises(Violation):
        courses()
