"""Staging, commit, revert and sleep on real ranks: what is live is always exactly one version."""

import pytest
import torch
from engine_exec.drive_executor import generate, running
from tiny_models import write_tiny

from rollout.errors import EngineBroken, RolloutError, VersionConflict
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.messages import UpdateRequest
from rollout.wire.codec import to_json, to_plain

PROMPTS = [[5, 6, 7], list(range(40, 60))]
NEW = 6


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    path = tmp_path_factory.mktemp("other")
    return path, write_tiny(path, "qwen3", dtype=torch.float32, seed=1)


@pytest.fixture(scope="module", params=["inline", "tp2"])
def started(request, tiny, nothing_left):
    two = request.param == "tp2"
    kind = "multiprocess" if two else "inline"
    with running(tiny[0], executor=kind, tensor_parallel_size=1 + two) as executor:
        yield executor


@pytest.fixture(scope="module")
def fresh(started, other):
    """What an engine started from the other weights gives: its results and its digests."""
    kind = "inline" if started.size == 1 else "multiprocess"
    with running(other[0], executor=kind, tensor_parallel_size=started.size) as executor:
        return results(executor, 0), [r["digests"] for r in ask(executor, "digests", {})]


@pytest.fixture
def executor(started, tiny):
    """The ranks with the first weights live as version 0, whatever came before."""
    stage(started, tiny[1].state_dict().items(), "reset")
    ask(started, "commit", {"version": 0})
    return started


def ask(executor, method, args):
    return [future.result(20)[0] for future in executor.call(method, args)]


def stage(executor, tensors, update_id="u", between=lambda: None, **settings):
    """Send ``tensors`` in small buckets, running ``between`` after each; the ranks' votes."""
    request = UpdateRequest(
        update_id=update_id, transport="inline", bucket_bytes=1 << 14, timeout=10.0, **settings
    )
    ask(executor, "stage_begin", {"request": to_plain(request)})
    ask(executor, "stage_connect", {"update_id": update_id})
    packer = BucketPacker(1 << 14)

    def send(buckets):
        for header, payload in buckets:
            args = {"update_id": update_id, "header": to_json(header).decode()}
            futures = executor.call("stage_bucket", args, {"payload": payload.clone()})
            between()
            for future in futures:
                future.result(20)

    for name, tensor in tensors:
        send(packer.add(name, tensor))
    send(packer.flush())
    return ask(executor, "stage_seal", {"update_id": update_id, "num_buckets": packer.num_buckets})


def results(executor, version):
    return [(s.token_ids, s.raw) for s in generate(executor, PROMPTS, NEW, version=version)]


def test_a_commit_equals_a_fresh_start_and_a_revert_is_the_old_version(executor, other, fresh):
    before = results(executor, 0)
    old_digests = ask(executor, "digests", {})

    def unchanged():
        assert results(executor, 0) == before

    votes = stage(executor, other[1].state_dict().items(), between=unchanged)
    unchanged()
    assert ask(executor, "digests", {}) == old_digests
    assert (
        ask(executor, "commit", {"version": 1}) == [{"version": 1, "moved": False}] * executor.size
    )
    new, new_digests = fresh
    assert results(executor, 1) == new
    assert new != before
    assert [vote["digests"] for vote in votes] == new_digests
    for _ in range(2):  # the second changes nothing
        ask(executor, "revert", {"version": 0})
        unchanged()
    with pytest.raises(VersionConflict, match="cannot go back to 3"):
        ask(executor, "revert", {"version": 3})


def test_a_partial_update_keeps_the_rest(executor, other):
    name = "model.layers.1.mlp.down_proj.weight"
    old = dict(map(tuple, digest_of(executor)))
    stage(executor, [(name, other[1].state_dict()[name])], partial=True)
    ask(executor, "commit", {"version": 1})
    now = dict(map(tuple, digest_of(executor)))
    assert {key for key in old if old[key] != now[key]} == {key for key in old if key[1] == name}


def digest_of(executor):
    for rank, reply in enumerate(ask(executor, "stage_digests", {})):
        for source, starts, _, value in reply["digests"]:
            yield (rank, source, tuple(starts)), value


def test_a_refused_update_leaves_the_old_version_and_the_next_one_takes(executor, other, fresh):
    before = results(executor, 0)
    tensors = dict(other[1].state_dict())
    tensors["model.norm.weight"] = torch.ones(3)
    with pytest.raises(RolloutError, match=r"model\.norm\.weight"):
        stage(executor, tensors.items())
    assert results(executor, 0) == before
    stage(executor, other[1].state_dict().items(), "v")
    ask(executor, "commit", {"version": 1})
    assert results(executor, 1) == fresh[0]


def test_after_dropping_the_weights_only_a_full_update_brings_them_back(executor, other, fresh):
    ask(executor, "sleep", {"level": 2})
    ask(executor, "wake_up", {"tags": ["weights"]})
    ask(executor, "wake_up", {"tags": ["kv_cache"]})
    with pytest.raises(RolloutError, match="send a full update"):
        ask(executor, "digests", {})
    with pytest.raises(EngineBroken, match="send a full update"):
        stage(executor, [], partial=True)
    stage(executor, other[1].state_dict().items(), "v")
    ask(executor, "commit", {"version": 1})
    assert results(executor, 1) == fresh[0]


def test_an_update_without_staging_goes_straight_into_the_live_instance(executor, other, fresh):
    stage(executor, other[1].state_dict().items(), staging="none")
    ask(executor, "commit", {"version": 1})
    assert results(executor, 1) == fresh[0]
    assert not any(reply["has_shadow"] for reply in ask(executor, "info", {}))
