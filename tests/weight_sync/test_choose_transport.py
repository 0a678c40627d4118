"""Which road, backend and address an update takes, from what both sides say of themselves."""

import pytest

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
