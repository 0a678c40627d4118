"""A place in a foreign gloo group, before and after its process."""

from __future__ import annotations

import os

import pytest

from rollout.errors import TransferFailed
from rollout.weight_sync.transports.vllm_gloo import GlooMember
from rollout.weight_sync.transports.vllm_group import ForeignGroup


def test_a_place_that_was_left_touches_no_file_that_came_after_it(tmp_path) -> None:
    member = GlooMember(ForeignGroup(host="127.0.0.1", port=1, rank_offset=1, size=2), 1)
    member.close()
    path = tmp_path / "another"
    path.write_bytes(bytes(100))
    files = [path.open("r+b") for _ in range(8)]  # one gets the descriptor that is free again
    try:
        assert member._memory in [file.fileno() for file in files]
        with pytest.raises(TransferFailed, match="the group was left"):
            member.receive(1000, 1.0)
        assert os.path.getsize(path) == 100
    finally:
        for file in files:
            file.close()
