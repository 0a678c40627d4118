"""A front that follows a directory: its newest checkpoint is live on every member, or on none."""

import asyncio
import threading

import pytest
import torch
from fleet_front import ENGINE, Front, front_process
from safetensors.torch import load_file, save_file
from shared_engines import eventually
from tiny_heads import write_release
from tiny_models import write_tiny

from rollout import Rollout
from rollout.cli.following import following
from rollout.errors import ConfigError, RolloutError, WeightMismatch
from rollout.weight_sync.versions.follower import Follower
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs"
    path.mkdir()
    return path


def test_the_newest_checkpoint_is_followed_by_all_and_who_joins_has_it_from_them(
    engines, runs, tmp_path
):
    front = Front(tmp_path / "record", engines[:2])
    try:
        asyncio.run(followed(front, engines[2], runs))
    finally:
        front.close()


async def followed(front, third, runs):
    client = front.rollout
    for number in (3, 7):  # 3 is passed over
        write_tiny(runs / f"checkpoint-{number}", seed=number)
    async with following(str(runs), [str(runs)], 30.0, front.backend):
        eventually(client.receipts)
        [receipt] = client.receipts()
        assert (receipt.version, receipt.label) == (7, "checkpoint-7")
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        (runs / "checkpoint-8").mkdir()
        save_file({"model.other": torch.ones(3)}, runs / "checkpoint-8" / "model.safetensors")
        eventually(lambda: "model.other" in client.metrics().follow_error)
        name = front.fleet.add(third.address)
        eventually(lambda: name in [link.name for link in front.fleet.serving()])
        assert third.check_weights(str(runs / "checkpoint-7")).equal
        last = write_tiny(runs / "checkpoint-12", seed=12)
        eventually(lambda: not client.metrics().follow_error)
        assert client.receipts()[-1].details["members"] == dict.fromkeys(
            (*front.names, name), "committed"
        )
        assert all(link.client.info().label == "checkpoint-12" for link in front.fleet.links())
        stats = client.metrics()
        assert (stats.following, stats.weight_version) == (str(runs), 12)
        assert stats.follow_failures_total >= 1
        assert client.check_weights(last).equal
    assert "follow" not in {thread.name for thread in threading.enumerate()}


def test_what_is_under_way_when_the_front_ends_changes_nothing(front, runs):
    class Ended:
        """The link, which ends after the last byte and before the votes."""

        joins, local_address = False, front.backend.local_address
        info, receipts = front.backend.info, front.backend.receipts

        def open(self):
            channel = front.backend.open()
            seal = channel.seal

            def ended_before(said):
                end = threading.Thread(target=follower.interrupt, args=("the service ends",))
                end.start()
                end.join()
                seal(said)

            channel.seal = ended_before
            return channel

    follower = Follower(runs, [runs], Ended, timeout=30.0)
    write_tiny(runs / "checkpoint-7", seed=7)
    with pytest.raises(RolloutError, match="the service ends"):
        follower.look()
    assert front.rollout.weight_version == 0
    assert front.rollout.weight_info().state == "idle"
    assert Follower(runs, [runs], lambda: front.backend.link).look().version == 7


def test_a_version_with_a_head_goes_live_on_members_that_draft_by_it(runs, tmp_path):
    for seed, name in enumerate("ab"):
        write_release(tmp_path / name, "qwen3_next", seed=seed)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    drafting = {"draft_component": "mtp", "num_speculative_tokens": 2, "dtype": "float32"}
    settings = [drafting, drafting, {"dtype": "float32"}]
    engines = [Rollout(str(tmp_path / "a"), **ENGINE, **more) for more in settings]
    front = Front(tmp_path / "record", engines[:2])
    try:
        other = engines[2].address
        with pytest.raises(ConfigError, match=r"it has another model: .*\(mtp:mtp\."):
            front.fleet.add(other, ask=True)
        write = VersionWriter(LocalStore(runs), dtype=torch.float32).write
        write(new, 7)
        follower = Follower(runs, [runs], lambda: front.backend.link, timeout=30.0)
        receipt = follower.look()
        assert receipt.version == 7
        assert set(receipt.components) == {"policy", "mtp"}
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        policy = {name: t for name, t in new.items() if not name.startswith("mtp.")}
        for engine in engines[:2]:
            assert engine.check_weights({"policy": policy, "mtp": new}).equal
        write({**policy, "mtp.fc.weight": new["mtp.fc.weight"]}, 8)
        with pytest.raises(WeightMismatch, match=r"mtp:mtp.* is missing"):
            follower.look()
        write(old, 9)
        assert follower.look().version == 9
        assert front.rollout.check_weights({"policy": old, "mtp": old}).equal
    finally:
        front.close()
        for engine in engines:
            engine.shutdown()


@pytest.mark.more
def test_rollout_fleet_follows_over_engines_that_run(engines, runs, tmp_path):
    addresses = [engine.address for engine in engines]
    flags = ("--follow", str(runs), "--weight-dir", str(tmp_path))
    with (
        front_process(tmp_path / "record", *addresses, flags=flags) as front,
        Rollout.connect(front.grpc) as client,
    ):
        last = write_tiny(runs / "checkpoint-4", seed=4)
        eventually(lambda: client.weight_version == 4)
        assert client.check_weights(last).equal
        assert client.metrics().following == str(runs)
    assert front.process.returncode == 0
