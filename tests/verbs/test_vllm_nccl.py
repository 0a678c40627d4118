"""The one part of the NCCL side that needs no GPU: the communicator's id, taken out of a pickle."""

from __future__ import annotations

import ctypes
import os
import pickle

import pytest

from rollout.errors import TransferFailed
from rollout.weight_sync.transports.vllm_nccl import unique_id


class UniqueId(ctypes.Structure):
    """As vLLM declares it."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Trap:
    """Unpickling it is noticed."""

    def __reduce__(self):
        return os.putenv, ("ROLLOUT_TRAP", "sprung")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_id_comes_out_of_the_pickle_that_vllm_stores(protocol: int) -> None:
    wanted = os.urandom(128)
    made = UniqueId.from_buffer_copy(wanted)
    assert unique_id(pickle.dumps(made, protocol)) == wanted


@pytest.mark.parametrize("stored", [b"", b"x" * 200, pickle.dumps(b"short"), pickle.dumps(Trap())])
def test_anything_else_is_refused_and_nothing_is_unpickled(stored: bytes) -> None:
    with pytest.raises(TransferFailed, match="no NCCL id"):
        unique_id(stored)
