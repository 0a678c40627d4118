"""Faults as a generator finds them, in whatever order, over the coordinator's own code."""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout.fleet.simulation.findings import Weather
from rollout.fleet.simulation.simulator import Simulation

# `make soak` sets it: 25 courses take about two seconds.
COURSES = int(os.environ.get("ROLLOUT_TEST_FLEETS", "25"))
MEMBERS = st.integers(0, 4)
SECONDS = st.floats(0.1, 8.0)


class FleetMachine(RuleBasedStateMachine):
    """A fleet in virtual time. What is broken is a ``Violation`` of the simulator's, which has the
    record and who holds what: a version with two contents or served below what was answered, a
    commit that no record has, a commit that is lost, and at the end a fleet that does not rest.
    """

    @initialize(
        members=st.integers(1, 5), quorum=st.integers(1, 3), seed=st.integers(0, 1 << 16),
        loss=st.sampled_from((0.0, 0.05, 0.2)), delay=st.sampled_from((0.001, 0.05)),
    )  # fmt: skip
    def start(self, members, quorum, seed, loss, delay):
        weather = Weather(loss=loss, delay=delay, stage=0.2)
        quorum = min(members, quorum)
        self.fleet = Simulation(members=members, seed=seed, quorum=quorum, weather=weather)
        self.fleet.pass_time(2.0)

    def name(self, index):
        return f"m{index % len(self.fleet.engines)}"

    @rule(seconds=st.floats(0.001, 4.0))
    def time_passes(self, seconds):
        self.fleet.pass_time(seconds)

    @rule(back=st.booleans(), seconds=st.floats(0.0, 2.0))
    def update(self, back, seconds):
        self.fleet.update(back=back)
        self.fleet.pass_time(seconds)

    @rule(seconds=st.floats(5.0, 20.0))
    def calm_and_an_update(self, seconds):
        self.fleet.pass_time(seconds)
        self.fleet.update()
        self.fleet.pass_time(1.0)

    @rule(index=MEMBERS, seconds=SECONDS)
    def a_member_dies(self, index, seconds):
        self.fleet.faults.crash(self.name(index), seconds)

    @rule(index=MEMBERS, seconds=SECONDS)
    def a_member_is_cut_off(self, index, seconds):
        self.fleet.faults.cut(self.name(index), seconds)

    @rule(index=MEMBERS, seconds=SECONDS)
    def a_member_is_stopped(self, index, seconds):
        self.fleet.faults.stop(self.name(index), seconds)

    @rule(index=MEMBERS, seconds=SECONDS)
    def a_members_answers_are_lost(self, index, seconds):
        self.fleet.faults.mute(self.name(index), seconds)

    @rule(index=MEMBERS, seconds=SECONDS)
    def a_members_clock_jumps(self, index, seconds):
        self.fleet.faults.jump(self.name(index), seconds)

    @rule(index=MEMBERS, seconds=SECONDS)
    def leave(self, index, seconds):
        self.fleet.faults.leave(self.name(index), seconds)

    @rule(index=MEMBERS, seconds=SECONDS)
    def restart(self, index, seconds):
        self.fleet.faults.restart(self.name(index), seconds)

    @rule(seconds=SECONDS)
    def the_coordinator_dies(self, seconds):
        self.fleet.faults.crash_coordinator(seconds)

    @rule(seconds=SECONDS)
    def another_coordinator_takes_over(self, seconds):
        self.fleet.faults.usurp(seconds)

    @rule(seconds=SECONDS)
    def the_coordinator_is_stopped(self, seconds):
        self.fleet.faults.stop_coordinator(seconds)

    @rule(seconds=SECONDS)
    def the_disk_is_full(self, seconds):
        self.fleet.faults.fill_disk(seconds)

    @rule(seconds=SECONDS)
    def the_disk_is_slow(self, seconds):
        self.fleet.faults.slow_disk(seconds)

    @invariant()
    def nobody_is_served_what_breaks_a_promise(self):
        for name in self.fleet.engines:
            self.fleet.read(name)

    def teardown(self):
        if hasattr(self, "fleet"):
            self.fleet.rest()


test_no_course_of_faults_breaks_a_promise = FleetMachine.TestCase
test_no_course_of_faults_breaks_a_promise.settings = settings(
    max_examples=COURSES,
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize="ROLLOUT_TEST_FLEETS" not in os.environ,  # a soak looks for new courses
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
