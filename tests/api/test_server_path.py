"""Updates whose directory the server reads itself: only under what it allows."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import save_file

from rollout import Rollout
from rollout.errors import (
    ConfigError,
    IncompleteUpdate,
    InvalidRequest,
    SourceFailed,
    WeightMismatch,
)
from rollout.rpc import rollout_pb2
from rollout.rpc.connection import Connection
from rollout.rpc.services import WeightSyncStub
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter


@pytest.fixture(scope="module")
def weights(tmp_path_factory, checkpoint, other_weights):
    """Plain copies: safetensors refuses shared memory."""
    return {name: t.clone().contiguous() for name, t in other_weights.items() if name != "lm_head"}


@pytest.fixture(scope="module")
def roots(tmp_path_factory, weights):
    allowed, outside = tmp_path_factory.mktemp("allowed"), tmp_path_factory.mktemp("outside")
    for where in (allowed / "checkpoint-5", outside / "checkpoint-5"):
        where.mkdir()
        save_file(weights, where / "model.safetensors")
    return allowed, outside


@pytest.fixture(scope="module")
def reader(bare_checkpoint, roots):
    """An engine that may read one directory."""
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32}
    with Rollout(bare_checkpoint, weight_dirs=[str(roots[0])], **settings) as rollout:
        yield rollout


@pytest.fixture(params=["embedded", "grpc"])
def rollout(request, reader):
    if request.param == "embedded":
        yield reader
        return
    with Rollout.connect(reader.address, timeout=10) as client:
        yield client


def test_the_server_reads_a_checkpoint_that_is_allowed(rollout, roots, weights) -> None:
    live = rollout.weight_version
    receipt = rollout.update_weights(
        server_path=roots[0] / "checkpoint-5", version=live + 7, label="five", timeout=10
    )
    assert (receipt.version, receipt.label) == (live + 7, "five")
    assert rollout.weight_version == live + 7
    assert rollout.check_weights(weights).equal


def test_links_that_lead_in_a_circle_are_named(rollout, roots, weights) -> None:
    where = roots[0] / "circles"
    where.mkdir(exist_ok=True)
    for name in ("checkpoint-6", "model.safetensors"):
        (where / name).unlink(missing_ok=True)
        (where / name).symlink_to(where / name)
    for path in (where, where / "checkpoint-6"):
        with pytest.raises(SourceFailed, match="its links lead in a circle"):
            rollout.update_weights(server_path=path, timeout=10)


def test_a_path_that_the_file_system_refuses_to_look_at_is_named(rollout, roots) -> None:
    with pytest.raises(SourceFailed, match=r"x cannot be read: .*name too long"):
        rollout.update_weights(server_path=roots[0] / ("x" * 300), timeout=10)


def test_a_root_that_is_not_there_yet_is_warned_of_once(bare_checkpoint, tmp_path, caplog) -> None:
    later, there = tmp_path / "later", tmp_path
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32}
    with Rollout(bare_checkpoint, weight_dirs=[later, there], **settings):
        pass
    told = f"--weight-dir {later} (weight_dirs=): no such directory yet"
    assert [text for text in caplog.messages if "--weight-dir" in text] == [told]


def test_a_read_that_is_asked_for_again_by_its_id_is_done_once(rollout, roots) -> None:
    asked = {"server_path": roots[0] / "checkpoint-5", "timeout": 10}
    name = f"read-{rollout.weight_version}"
    with ThreadPoolExecutor(2) as pool:  # the second comes while the first is under way
        runs = [pool.submit(rollout.update_weights, update_id=name, **asked) for _ in range(2)]
        first, second = (run.result(60) for run in runs)
    assert first == second == rollout.update_weights(update_id=name, **asked)
    assert rollout.weight_version == first.version
    assert rollout.update_weights(update_id=f"{name}+", **asked).version == first.version + 1
    # What has taken its place since is not what was asked for: it is read again.
    again = rollout.update_weights(update_id=name, **asked)
    assert again.version == rollout.weight_version == first.version + 2
    assert rollout.rollback().version == first.version + 3
    assert rollout.update_weights(update_id=name, **asked).version == first.version + 4
    with pytest.raises(ConfigError, match="goes with server_path"):
        rollout.update_weights([], update_id=name)


def test_the_server_reads_a_written_version(rollout, reader, roots, weights) -> None:
    live = rollout.weight_version
    moved = {name: tensor + 0.5 for name, tensor in weights.items()}
    store = LocalStore(roots[0])
    VersionWriter(store, dtype=reader.weight_info().dtype).write(moved, live + 100)
    receipt = rollout.update_weights(server_path=str(roots[0] / f"{live + 100:012d}"), timeout=10)
    assert receipt.version == live + 1
    assert rollout.check_weights(moved).equal


def refused(rollout, path, error, text) -> None:
    live, started = rollout.weight_version, time.monotonic()
    with pytest.raises(error, match=text):
        rollout.update_weights(server_path=path, timeout=60)
    assert time.monotonic() - started < 30
    assert (rollout.weight_version, rollout.weight_info().state) == (live, "idle")


def test_a_directory_outside_is_refused_whether_it_exists_or_not(rollout, roots) -> None:
    for path in (roots[1] / "checkpoint-5", roots[1] / "none", roots[0] / ".." / "x", "/"):
        refused(rollout, path, ConfigError, "is outside every --weight-dir")
    link = roots[0] / "link"
    if not link.is_symlink():
        link.symlink_to(roots[1] / "checkpoint-5")
    refused(rollout, link, ConfigError, "is outside every --weight-dir")
    inner = roots[0] / "files"
    inner.mkdir(exist_ok=True)
    if not (inner / "model.safetensors").is_symlink():
        (inner / "model.safetensors").symlink_to(roots[1] / "checkpoint-5" / "model.safetensors")
    refused(rollout, inner, ConfigError, "outside every --weight-dir; not read")


def test_what_is_not_there_whole_is_named(rollout, roots) -> None:
    refused(rollout, roots[0] / "none", ConfigError, "is not a directory")
    empty = roots[0] / "checkpoint-9"
    empty.mkdir(exist_ok=True)
    refused(rollout, empty, IncompleteUpdate, r"no \*\.safetensors and no manifest\.json")
    half = roots[0] / "checkpoint-10"
    half.mkdir(exist_ok=True)
    whole = (roots[0] / "checkpoint-5" / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(whole[:-10])
    refused(rollout, half, IncompleteUpdate, "half-written")
    version = roots[0] / f"{10**9:012d}"
    version.mkdir(exist_ok=True)
    (version / "manifest.json").unlink(missing_ok=True)
    refused(rollout, version, IncompleteUpdate, r"no manifest\.json")
    (version / "manifest.json").write_text('{"format": "roll')
    refused(rollout, version, IncompleteUpdate, r"manifest\.json is half-written")


def test_what_does_not_fit_is_named(rollout, roots, weights) -> None:
    wrong = roots[0] / "wrong"
    wrong.mkdir(exist_ok=True)
    save_file({"model.other": weights["model.norm.weight"]}, wrong / "model.safetensors")
    refused(rollout, wrong, WeightMismatch, r"model\.other")


def test_a_transport_or_two_sources_make_no_sense(rollout, roots, weights) -> None:
    path = roots[0] / "checkpoint-5"
    for keywords in ({"transport": "ipc"}, {"encoding": "delta"}):
        with pytest.raises(ConfigError, match="leave transport and encoding"):
            rollout.update_weights(server_path=path, **keywords)
    with pytest.raises(ConfigError, match="server_path= alone"):
        rollout.update_weights(weights, server_path=path)
    with pytest.raises(ConfigError, match="server_path= alone"):
        rollout.update_weights()


def test_options_on_the_wire_are_not_believed(reader, roots) -> None:
    connection = Connection(reader.address, None, None)
    path = str(roots[0] / "checkpoint-5")
    for said in (b"[]", b'{"transport": "ipc"}', b'{"version": "7"}', b'{"timeout": true}'):
        request = rollout_pb2.UpdateFromRequest(path=path, options_json=said)
        with pytest.raises(ConfigError):
            connection.ask(WeightSyncStub, "UpdateFrom", request, 10)
    request = rollout_pb2.UpdateFromRequest(path=path, options_json=b"{")
    with pytest.raises(InvalidRequest, match="options_json"):
        connection.ask(WeightSyncStub, "UpdateFrom", request, 10)
    connection.close_sync()


def test_a_foreign_client_may_leave_the_options_out(reader, roots) -> None:
    version = reader.weight_version
    connection = Connection(reader.address, None, None)
    request = rollout_pb2.UpdateFromRequest(path=str(roots[0] / "checkpoint-5"))
    connection.ask(WeightSyncStub, "UpdateFrom", request, 30)
    connection.close_sync()
    assert reader.weight_version == version + 1


def test_an_engine_that_allows_no_directory_reads_none(client, roots) -> None:
    with pytest.raises(ConfigError, match="allow it with --weight-dir"):
        client.update_weights(server_path=roots[0] / "checkpoint-5")
