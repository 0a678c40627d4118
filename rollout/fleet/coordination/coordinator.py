"""Who serves in a fleet, and what commits: a state machine without I/O.

Messages and the time go in, actions come out (``actions``); the service, the tests of faults and
the simulator run this same code. Times are seconds of the caller's monotonic clock.

A member:

    JOINING --its digest is the fleet's--> SERVING --silent, late, or not part of a commit--> FENCED
       ^                                    | ^                                                 |
       |                                    | +---- it stands, and holds what is live ----------+
       +------------------------ it stands, and holds something else ---------------------------+
                                            |
       it is about to end, or is to go: LEAVING --nothing runs there, or a commit without it--> LEFT

LEAVING it is sent nothing new, and begins no update; one that is under way it goes on with, and
while nobody who stays holds what is live it is asked to stay until somebody has its copy. Who has
LEFT comes back in another life alone, and is waited for by nobody; while it still answers, what it
holds is not lost, and others get it from there.

An update:

    STAGING --all that are left have voted, and it is asked for--> WRITING --> COMMITTING --> ended
       +-- fewer than ``quorum`` are left, or the trainer gives up --> aborted

The rules that make it one commit:

- A yes vote binds: a member that is prepared takes a decision alone. What is written is decided.
- A member serves until ``serves_until`` at the latest, counted from when its clock was *read*. It
  gets no grant between a commit's writing and its own answer, nor ever while it is not SERVING.
- A commit is answered once every member that does not hold it can serve no more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rollout.errors import TransferFailed, UpdateInProgress, VersionConflict
from rollout.fleet.coordination.actions import Action, Adapters, Ask, Ended, Promise, Tell, Write
from rollout.fleet.coordination.admission import Admission
from rollout.fleet.coordination.founding import new_epoch
from rollout.fleet.coordination.leases import DRIFT, Leases
from rollout.fleet.coordination.member import HAS_LEFT, Member, Status, said
from rollout.fleet.coordination.members import Members
from rollout.fleet.coordination.update import Phase, Update
from rollout.weight_sync.protocol.membership import Grant, Standing
from rollout.weight_sync.protocol.messages import Decision
from rollout.weight_sync.protocol.version_number import next_version


class Coordinator:
    """Not thread-safe. ``promise`` is what was durable, its ``fence`` already this one's.

    ``quorum``: how many members must hold a version for it to commit. ``lease``: seconds of a
    grant; ``earlier``: the longest that earlier coordinators may have given, 0 for none.
    """

    def __init__(
        self, promise: Promise, *, quorum: int, lease: float, now: float, earlier: float = 0.0
    ) -> None:
        self.promise = promise
        self.quorum, self.lease = quorum, lease
        self.members = Members()
        self._leases = Leases(promise.fence, promise.fleet, lease)
        self._admission = Admission(self.members, lease)
        self.update: Update | None = None
        # Grants of earlier coordinators have ended then.
        self._before = now + earlier * (1 + DRIFT)
        self._founding: Promise | None = None
        self._settled = 0  # the last grant before what is promised was live on all
        self._removed: list[str] = []  # since the last commit, of those that left

    # ---- members ----

    def add(self, name: str, now: float) -> list[Action]:
        """A member that is to join; again for one whose process was replaced."""
        old = self.members.get(name)
        member = self.members[name] = Member(name)
        lost: list[Action] = []
        if old is not None:
            member.serves_until, member.granted = old.serves_until, old.granted
            lost = self._lose(name, "it was replaced", now)
        return [*lost, self._ask(member, now)]

    def died(self, name: str, now: float, why: str = "its process has ended") -> list[Action]:
        """A member's process has ended: it serves no more, holds nothing, and does not answer."""
        if (member := self.members.get(name)) is None:
            return []
        member.holds, member.serves_until, member.busy = False, now, False
        member.gone, member.standing = True, None
        return [*self._fence(member, why, now), *self._settle(now)]

    def remove(self, name: str, now: float) -> list[Action]:
        """A member that the fleet is to forget; until its lease is over no commit is answered."""
        member = self.members.get(name)
        if member is None:
            return []
        why = "it was removed"
        if member.leaves:
            self._removed, why = [*self._removed, name], HAS_LEFT
        member.status = Status.FENCED
        last = self._ask(member, now)
        del self.members[name]
        self._before = max(self._before, member.serves_until)
        return [last, *self._lose(name, why, now)]

    def leave(self, name: str, now: float) -> list[Action]:
        """A member is to go: it gets nothing new from here on."""
        member = self.members.get(name)
        return [] if member is None or member.leaves else self._leave(member, now)

    def let_go(self, name: str, now: float) -> list[Action]:
        """It has had its time to end what runs there; see ``serves_none``."""
        member = self.members.get(name)
        if member is None or member.status is Status.LEFT:
            return []
        return [*self.leave(name, now), *self._fence(member, HAS_LEFT, now), self._ask(member, now)]

    def serves_none(self, name: str, now: float) -> bool:
        """Whether no token can come from it any more."""
        member = self.members.get(name)
        return member is None or (not member.has_lease and now >= member.serves_until)

    @property
    def serving(self) -> list[str]:
        return self.members.serving

    @property
    def serial(self) -> int:
        """Of the last grant."""
        return self._leases.serial

    def heard_of(self, serial: int, now: float) -> bool:
        """Whether all that are there have taken a grant behind that one."""
        return self.members.have_answered(serial, self.lease, now)

    def is_needed(self, name: str, now: float) -> bool:
        """Whether what is live would be lost with a member that leaves."""
        return bool(self.promise.version) and self.members.is_last_holder(name, self.lease, now)

    def stood(self, name: str, grant: Grant, standing: Standing, now: float) -> list[Action]:
        """A member has taken ``grant`` and says where it stands."""
        member = self.members.get(name)
        if member is None or member.gone:
            return []
        member.answered, known = max(member.answered, grant.serial), member.standing
        is_new = known is None or known.epoch != standing.epoch  # who is known has been compared
        if is_new and (twin := self.members.twin(name, standing.epoch)):
            member.standing = None  # so that it is told nothing: the other one's lease is the same
            why = f"it is the same engine as member {twin}: remove one of the two"
            return self._fence(member, why, now)
        self.members.stood(name, standing.epoch)
        if known is not None and known.epoch != standing.epoch:
            lost = self._fence(member, "it has restarted", now)
            member.status, member.why = Status.FENCED, "it has restarted"  # also where it had left
            member.holds, member.serves_until, member.unfit = False, now, ""
            member.standing, member.heard = standing, now
            return [*lost, *self._admit(member, now)]
        member.standing, member.heard = standing, now
        if grant.epoch is not None and grant.until == 0 and grant.serial > member.granted:
            member.serves_until = now
        left = standing.prepared
        if left and (self.update is None or left != self.update.update_id):
            return [self._decision(name, left, now)]  # it voted after the abort, or did not hear
        if standing.state == "leaving" and member.status is not Status.LEFT:
            return self._leave(member, now)
        if member.has_lease:
            if standing.state in ("dead", "closed", "broken"):
                return self._fence(member, f"it is {standing.state}", now)
            old = grant.serial <= self._settled
            if standing.version != self.promise.version and not old and not self._may_differ(name):
                member.holds = False
                why = (
                    f"it has version {standing.version}, which this front has not committed: "
                    "somebody has updated it at its own address"
                )
                return self._fence(member, why, now)
            return []
        return [*self._admit(member, now), *self._settle(now)]

    def silent(self, name: str, why: str, now: float) -> list[Action]:
        """A member did not answer an ``Ask`` or a ``Check``."""
        member = self.members.get(name)
        if member is not None and not member.gone:
            member.busy = False
            member.why = member.why if member.leaves else why
        return []

    def unfit(self, name: str, life: int, why: str, now: float) -> list[Action]:
        """A member can hold nothing of the fleet's in this ``life`` (its epoch): its model differs,
        or how it holds it.
        """
        member = self.members.get(name)
        if member is not None and member.standing is not None and member.standing.epoch == life:
            member.unfit = why
        return self.silent(name, why, now)

    def restarted(self, name: str, grant: Grant, why: str, now: float) -> list[Action]:
        """A member refuses ``grant`` as one for another life: its process was replaced where it
        was, as a pod is, and nobody has said so.
        """
        member = self.members.get(name)
        if member is None or member.standing is None or member.standing.epoch != grant.epoch:
            return self.silent(name, why, now)
        lost = self._fence(member, "it has restarted", now)
        fresh = self.members[name] = Member(name, granted=member.granted)
        return [*lost, self._ask(fresh, now), *self._settle(now)]

    def checked(
        self, name: str, version: int, digest: int, now: float, adapters: Adapters = ()
    ) -> list[Action]:
        """A member holds weights of ``digest`` as ``version``: proof enough, or not. ``adapters``:
        those that are in the digest.
        """
        member = self.members.get(name)
        if member is None or member.gone:
            return []
        member.busy = False
        live = self.promise
        settling = self.update is not None and self.update.is_settling
        if member.leaves:
            equal = (version, digest) == (live.version, live.digest)
            member.holds = member.holds or (equal and not settling)
            return []
        if (version, digest) == (live.version, live.digest) and member.status is not Status.SERVING:
            if settling:
                return []  # about to be something else: it is looked at again
            member.holds, member.why, member.status = True, "", Status.SERVING
            member.fails, member.behind = 0, False
            # Its clock was read some time ago: the next grant is of use, which this one may not be.
            member.serves_until = max(member.serves_until, now + self._leases.counted)
            return [self._ask(member, now)]
        if version == live.version and not live.digest and self._founding is None:
            self._founding = replace(live, digest=digest, adapters=adapters)
            return [Write(self._founding)]
        if version == live.version and live.digest:
            member.why = f"its weights of version {version} are not the fleet's: restart it"
        return []

    def unfilled(self, name: str, why: str, now: float) -> list[Action]:
        """A member could not be brought up to date."""
        self._admission.failed(name, why, now)
        return self.silent(name, why, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: grants, members that were not heard of, decisions told again."""
        actions: list[Action] = []
        for member in self.members.values():
            serving = member.has_lease
            if serving and now >= member.serves_until:
                why = f"it was not heard of for {now - member.heard:.3g} s"
                actions += self._fence(member, f"{why}: {member.why}" if member.why else why, now)
            elif member.gone:
                continue
            elif now - member.asked >= self.lease / (4 if serving else 2) and not member.busy:
                actions.append(self._ask(member, now))
        update = self.update
        if update is not None and update.phase is Phase.COMMITTING:
            actions += self._lose_late_joiners(update, now)
            if now - update.told >= self.lease / 4:
                actions += update.tell_commits(self.promise.fence, now)
            actions += self._settle(now)
        return [*actions, *self._refound(now)]

    def serve(self, now: float) -> list[Action]:
        """The fleet begins: from here on a member that hears nothing serves nobody, where until now
        an engine that had served alone went back to that.
        """
        self._leases.begun = True
        return [self._ask(member, now) for member in self.members.values()]

    # ---- an update ----

    @property
    def idle(self) -> bool:
        """Whether an update can begin."""
        return self.update is None and self._founding is None

    def begin(
        self,
        update_id: str,
        version: int | None,
        now: float,
        *,
        back: bool = False,
        reversible: bool = True,
        joins: bool = False,
    ) -> tuple[list[str], int]:
        """The members that take part, and the version that the update will have.

        ``back``: it is a rollback, to the digest that was promised before the last commit.
        ``reversible``: a rollback may follow it. ``joins``: it brings all that a member holds, so
        that those take part, too, which are behind and do not serve: however close one update
        follows another, nobody is kept out.
        """
        if not self.idle:
            raise UpdateInProgress("another update of this fleet is under way")
        if update_id == self.promise.update_id:
            raise VersionConflict(
                f"update {update_id} is already live as version {self.promise.version}; another "
                "update needs an update_id of its own"
            )
        live = self.promise.version
        version = next_version(version, live)
        if back and not self.promise.before:
            raise VersionConflict(
                f"the fleet's version {live} has no predecessor: a rollback is possible once after "
                "a commit, and not once an adapter has been unloaded"
            )
        members = self.serving
        if len(members) < self.quorum:
            raise TransferFailed(
                f"{len(members)} of the fleet's {len(self.members)} members serve, and a commit "
                f"needs {self.quorum}: {self.members.whys() or 'no more were added'}; version "
                f"{live} serves on (send the update again once enough of them do; a front started "
                "with --quorum 1 commits on one)"
            )
        self._leases.begun, reversible = True, reversible and not back
        if joins:
            members += self._admission.joining(self.promise, now)
        left = dict.fromkeys(members, False)
        gone = [m.name for m in self.members.values() if m.leaves]
        gone += [name for name in self._removed if name not in self.members]
        self.update = Update(
            update_id, version, left, back=back, reversible=reversible,
            lost=dict.fromkeys(gone, HAS_LEFT),
        )  # fmt: skip
        return members, version

    def kept_out(self, now: float) -> list[str]:
        """Members that need a whole update: see ``Admission``."""
        return self._admission.kept_out(self.promise, now)

    def brings_up(self, now: float) -> bool:
        """Whether an update that brings changes alone should wait: see ``Admission``."""
        return self._admission.brings_up(self.promise, now)

    # What is said of an update names it: what comes late is of another.

    def lost(self, update_id: str, name: str, why: str, now: float) -> list[Action]:
        """A member has failed its part of the update."""
        return [] if self._staging(update_id) is None else self._lose(name, why, now)

    def voted(
        self, update_id: str, name: str, digest: int, now: float, adapters: Adapters = ()
    ) -> list[Action]:
        """A member is prepared; ``digest``: of all that it will hold, the sender's own sum, with
        that of ``adapters`` in it.
        """
        update = self._staging(update_id)
        if update is None or name not in update.left:
            return []
        update.left[name], update.digest, update.adapters = True, digest, adapters
        return self._judge(update, now)

    def commit(self, update_id: str, now: float) -> list[Action]:
        """The trainer asks that what all have voted for becomes live."""
        update = self._staging(update_id)
        if update is None:
            return []
        update.wanted = True
        return self._judge(update, now)

    def give_up(self, update_id: str, why: str, now: float) -> list[Action]:
        """The trainer's side has ended the update: in time, or after it is decided."""
        update = self._staging(update_id)
        return [] if update is None else self._abort(update, why)

    def written(self, promise: Promise, now: float) -> list[Action]:
        """What was to be written is durable: from here on there is one outcome."""
        self.promise, self._settled = promise, self._leases.serial
        if promise == self._founding:
            self._founding = None
            for member in self.members.values():
                member.holds = False
            # Who was looked at before this was written is so again, at once.
            there = (m for m in self.members.values() if m.standing and not (m.busy or m.gone))
            return [self._ask(member, now) for member in there]
        update = self.update
        assert update is not None, "nothing was to be written"
        update.phase, update.written = Phase.COMMITTING, now
        update.left = dict.fromkeys(update.left, False)
        actions = update.tell_commits(self.promise.fence, now)
        for member in self.members.values():
            member.holds, member.not_before = False, now
            if member.name not in update.left and member.has_lease:
                why = update.lost.get(member.name, "it took no part in the last commit")
                actions += [*self._fence(member, why, now), self._ask(member, now)]
        return [*actions, *self._settle(now)]

    def unwritten(self, why: str, now: float) -> list[Action]:
        """The record could not be written: nobody was told, so nothing is decided."""
        update, self._founding = self.update, None
        if update is None or update.phase is not Phase.WRITING:
            return []
        return self._abort(update, why)

    def decided(
        self, update_id: str, name: str, why: str, now: float, *, final: bool = True
    ) -> list[Action]:
        """A member has done what it was told; ``why`` not, if so; ``final``: nor will it."""
        update = self.update
        if (
            update is None
            or update.update_id != update_id
            or update.phase is not Phase.COMMITTING
            or name not in update.left
        ):
            return self._late(name, why)
        if not why:
            update.left[name] = True
            if (member := self.members.get(name)) is not None:
                member.holds = True
                if not member.has_lease:
                    member.asked = float("-inf")  # it may as soon as it has been asked
        elif final:
            return self._lose(name, why, now)
        return self._settle(now)

    # ---- helpers ----

    def _ask(self, member: Member, now: float) -> Ask:
        return self._leases.ask(member, now, in_doubt=self._in_doubt(member.name))

    def _staging(self, update_id: str) -> Update | None:
        update = self.update
        if update is None or update.update_id != update_id or update.phase is not Phase.STAGING:
            return None
        return update

    def _in_doubt(self, name: str) -> bool:
        """Whether it was told to commit, or will be, and has not answered."""
        update = self.update
        if update is None or update.phase is Phase.STAGING:
            return False
        return update.phase is Phase.WRITING or not update.left.get(name, False)

    def _may_differ(self, name: str) -> bool:
        update = self.update
        return update is not None and update.phase is not Phase.STAGING and name in update.left

    def _admit(self, member: Member, now: float) -> list[Action]:
        """What a member needs that stands and does not serve."""
        standing, live, update = member.standing, self.promise, self.update
        if not self._admission.is_ready(member) or (update is not None and update.is_settling):
            return []  # in an update that is decided, what is live changes
        if member.holds and standing is not None and standing.version == live.version:
            return self.checked(member.name, live.version, live.digest, now)
        return self._admission.bring_up(member, live, () if update is None else update.left, now)

    def _lose_late_joiners(self, update: Update, now: float) -> list[Action]:
        """Those that do not serve have no lease by whose end the others would know of them."""
        if now - update.written < self.lease:
            return []
        serving = set(self.serving)
        late = [name for name, done in update.left.items() if not done and name not in serving]
        return [a for name in late for a in self._lose(name, "it did not commit in time", now)]

    def _decision(self, name: str, update_id: str, now: float) -> Tell:
        """Of an update that a member was left with: what the record says, and else no."""
        commit = update_id == self.promise.update_id
        reason = "" if commit else "its coordinator has no record of a commit"
        decision = Decision(
            update_id=update_id, commit=commit, fence=self.promise.fence, reason=reason
        )
        return Tell(name, decision)

    def _late(self, name: str, why: str) -> list[Action]:
        member = self.members.get(name)
        if member is not None and not why:
            member.asked = float("-inf")  # it is asked again where it stands
        return []

    def _fence(self, member: Member, why: str, now: float) -> list[Action]:
        _end(member, why)
        return self._lose(member.name, member.why, now)

    def _leave(self, member: Member, now: float) -> list[Action]:
        """One that is about to end, or is to go, says where it stands."""
        if not member.has_lease:
            member.status = Status.LEFT
            return [*self._fence(member, HAS_LEFT, now), *self._settle(now)]
        if member.status is Status.SERVING:
            member.status, member.why = Status.LEAVING, HAS_LEFT
            return [self._ask(member, now)]
        standing, update = member.standing, self.update
        runs = standing is None or standing.running or standing.waiting
        if runs or (update is not None and member.name in update.left):
            return []
        if self.is_needed(member.name, now):
            return []
        return [*self._fence(member, HAS_LEFT, now), self._ask(member, now), *self._settle(now)]

    def _lose(self, name: str, why: str, now: float) -> list[Action]:
        update = self.update
        if update is None or name not in update.left:
            return []
        del update.left[name]
        member = self.members.get(name)
        update.lost[name] = why = HAS_LEFT if member is not None and member.leaves else why
        if update.phase is Phase.STAGING:
            return self._judge(update, now)
        actions: list[Action] = []
        if member is not None and member.has_lease:
            _end(member, why)
            actions.append(self._ask(member, now))
        return [*actions, *(self._settle(now) if update.phase is Phase.COMMITTING else ())]

    def _judge(self, update: Update, now: float) -> list[Action]:
        if len(update.left) < self.quorum:
            votes = f"{len(update.left)} of {self.quorum} votes needed"
            return self._abort(update, f"{votes}: {said(update.lost)}")
        if not update.wanted or not all(update.left.values()):
            return []
        update.phase = Phase.WRITING
        promised = update.promised(self.promise)
        if now >= self._before:  # no longer one is out
            promised = replace(promised, lease=self.lease)
        return [Write(promised)]

    def _abort(self, update: Update, why: str) -> list[Action]:
        """Members that were lost on the way hold what they held, and serve on."""
        self.update = None
        return update.aborted(self.promise.fence, why)

    def _settle(self, now: float) -> list[Action]:
        """Whether the commit can be answered: nobody serves, or will, what was before."""
        update = self.update
        if update is None or update.phase is not Phase.COMMITTING or now < self._before:
            return []
        for member in self.members.values():
            if not member.holds and now < member.serves_until:
                return []
        if not all(update.left.values()):
            return []
        # What was asked meanwhile may have been answered before its member had committed.
        self.update, self._settled, self._removed = None, self._leases.serial, []
        return [Ended(update.update_id, True, lost=update.lost)]

    def _refound(self, now: float) -> list[Action]:
        """Where nobody holds what was promised any more: a new epoch, with what there is."""
        if not self.idle or now < self._before:
            return []
        keeps = partial(self._admission.keeps, live=self.promise, now=now)
        founding = new_epoch(self.promise, self.members.values(), keeps, self._settled, now)
        if founding is None:
            return []
        self._founding = founding
        return [Write(founding)]


def _end(member: Member, why: str) -> None:
    """It serves no more once it hears of it; one that leaves will not again."""
    if member.leaves:
        member.status, member.why = Status.LEFT, HAS_LEFT
    else:
        member.status, member.why = Status.FENCED, why
