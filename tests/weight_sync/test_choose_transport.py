"""Which transport, backend and address an update takes, from what both sides say of themselves."""

import pytest

from rollout.errors import ConfigError
from rollout.weight_sync import transports
from rollout.weight_sync.trainer import session
from rollout.weight_sync.trainer.shard_layout import ShardLayout
from rollout.weight_sync.transports.broadcast import choose_backend


@pytest.mark.parametrize(
    ("device", "cuda_here", "backend"),
    [
        ("cpu", True, "tcp"),
        ("cuda:0", False, "tcp"),
        ("cuda:0", True, "nccl"),
        ("cuda", True, "nccl"),
    ],
)
def test_nccl_needs_devices_on_both_sides(device: str, cuda_here: bool, backend: str) -> None:
    assert choose_backend(device, cuda_here) == backend


@pytest.mark.parametrize(
    ("hosts", "first_at", "reached_by", "expected"),
    [
        (("a", "b"), "10.1.2.3", "127.0.0.1", "10.1.2.3"),
        (("a", "a"), "10.1.2.3", "127.0.0.1", "127.0.0.1"),  # nothing listens for other hosts
        (("a", "b"), "10.1.2.3", "10.9.9.9", "10.9.9.9"),
    ],
)
def test_ranks_of_several_hosts_meet_where_all_of_them_can(
    hosts, first_at, reached_by, expected
) -> None:
    """An engine within the first rank, or reached by loopback, knows no address for the others."""
    layout = ShardLayout(None, hosts=hosts, first_at=first_at)
    assert session.meeting_host(reached_by, layout) == expected
    assert session.meeting_host(reached_by, None) == reached_by


def test_a_name_that_others_have_for_a_transport_is_told_in_ours() -> None:
    for theirs, ours in (("nccl", "broadcast"), ("cuda_ipc", "ipc"), ("grpc", "grpc_stream")):
        with pytest.raises(ConfigError, match=f"by {theirs} goes '{ours}'; known: auto, .*{ours}"):
            transports.find(theirs)
    with pytest.raises(ConfigError, match="unknown transport 'rdma'; known: auto"):
        transports.find("rdma")
