"""Each fault at each moment of an update, one by one, over the coordinator's own code."""

import itertools
from collections import defaultdict

import pytest

from rollout.fleet.coordination.update import Phase
from rollout.fleet.simulation.findings import Weather
from rollout.fleet.simulation.simulator import Simulation

WEATHER = Weather(delay=0.02, stage=0.1, disk=0.1)  # so that every phase lasts
FAULTS = (
    "crash", "cut", "mute", "stop", "jump", "leave", "restart",
    "crash coordinator", "usurp", "stop coordinator", "fill disk", "slow disk",
)  # fmt: skip


def befall(fleet, kind, seconds):
    if kind in fleet.faults.of_members:
        fleet.faults.of_members[kind]("m1", seconds)
    else:
        fleet.faults.of_all[kind](seconds)


def course(kind, moment, seconds, seed):
    """An update with the fault at its ``moment``, and one after it; the phase that was hit."""
    fleet = Simulation(members=3, seed=seed, weather=WEATHER)
    fleet.pass_time(3.0)
    outcomes = []
    assert fleet.update(outcomes.append)
    fleet.pass_time(moment)
    update = fleet.coordinator.update
    phase = None if update is None else update.phase
    befall(fleet, kind, seconds)
    for _ in range(40):
        fleet.pass_time(0.25)
        for name in fleet.engines:
            fleet.read(name)
    assert len(outcomes) == 1, "the trainer was never answered"
    fleet.update()
    fleet.rest()
    return phase


def courses(kinds, moments, lengths):
    """The phases that each fault fell into."""
    hit = defaultdict(set)
    for kind, (number, moment), seconds in itertools.product(kinds, enumerate(moments), lengths):
        hit[kind].add(course(kind, moment, seconds, number))
    return hit


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_in_an_update_breaks_no_promise(kind):
    courses([kind], (0.0, 0.1, 0.3, 0.5), [3.0])


@pytest.mark.more
def test_every_fault_at_every_moment_of_an_update_breaks_no_promise():
    hit = courses(FAULTS, [0.03 * n for n in range(30)], [0.5, 4.0])
    phases = {Phase.STAGING, Phase.WRITING, Phase.COMMITTING, None}
    assert hit == dict.fromkeys(FAULTS, phases)
