"""One rank of a test: ``collective_rank.py CASE FD RANK SIZE RENDEZVOUS``; prints a JSON line."""

import hashlib
import json
import os
import signal
import sys
import time

import torch

from rollout.distributed import Rendezvous, TensorParallel, join_group
from rollout.engine.worker.shared_memory_group import SLOT, SharedMemoryGroup, share_memory
from rollout.wire.codec import from_plain

SHAPES = [(1,), (3, 5), (1, 896), (33, 67), (8, 4096), (2 * SLOT + 77,), (5, SLOT // 4)]


def inputs(shape, dtype, size, seed):
    """What every rank hands in; each rank can draw all of it."""
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=draw) * 3).to(dtype) for _ in range(size)]


def summed(parts):
    """In the order in which ranks add up: of four in a binary tree."""
    if len(parts) == 4:
        return (parts[0] + parts[1]) + (parts[2] + parts[3])
    return sum(parts[1:], parts[0])


def conformance(tp, other):
    """Sums equal the reference bit by bit, gathers too; rounds in a row reuse both slots."""
    seen = hashlib.sha256()
    for round_, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 2):
        for seed, shape in enumerate(SHAPES):
            parts = inputs(shape, dtype, tp.size, 100 * round_ + seed)
            want = summed([part.float() for part in parts])
            got = tp.all_reduce(parts[tp.rank].clone())
            if dtype == torch.float16:  # left to the other group
                torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0)
            else:
                assert torch.equal(got, want.to(dtype)), (dtype, shape)
            if dtype == torch.float32 and tp.size != 3:
                for group in (tp.group, other):  # the same order, whatever carries it
                    mine = TensorParallel(tp.rank, tp.size, group)
                    assert torch.equal(mine.tree_sum(parts[tp.rank].clone()), want), shape
            assert torch.equal(tp.all_gather(parts[tp.rank]), torch.cat(parts, -1)), (dtype, shape)
            seen.update(got.contiguous().view(torch.uint8).numpy().tobytes())
    strided = inputs((6, 10), torch.float32, tp.size, 7)
    want = sum(strided).T
    got = tp.all_reduce(strided[tp.rank].T)
    torch.testing.assert_close(got, want)
    assert got.data_ptr() == strided[tp.rank].data_ptr()
    empty = torch.zeros(0, 4)
    assert tp.all_reduce(empty) is empty
    for i in range(1000):  # many small ones: a lost wake-up or a slot reused early shows here
        value = torch.full((7,), float(i + tp.rank))
        assert tp.all_reduce(value).tolist() == [tp.size * i + sum(range(tp.size))] * 7
    return {"digest": seen.hexdigest(), "all_reduces": tp.all_reduces}


def killed(tp, other):
    """The last rank dies between two sums; the others say so at their deadline, asleep."""
    tp.all_reduce(torch.ones(4))
    if tp.rank == tp.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started, used = time.monotonic(), time.process_time()
    errors = []
    for _ in range(2):
        try:
            tp.all_reduce(torch.ones(SLOT))
        except TimeoutError as error:
            errors.append(str(error))
    seconds = time.monotonic() - started
    return {"errors": errors, "seconds": seconds, "cpu": time.process_time() - used}


def late(tp, other):
    """The last rank comes late: no error, the sum is right, and waiting took no core."""
    used = time.process_time()
    if tp.rank == tp.size - 1:
        time.sleep(0.6)
    total = tp.all_reduce(torch.ones(4)).tolist()
    return {"total": total, "cpu": time.process_time() - used}


def lacking(tp, other):
    """One rank has no memory: all stay with the other group."""
    assert tp.group is other
    return {"total": tp.all_reduce(torch.ones(4)).tolist()}


def main():
    case, fd, rank, size, where = sys.argv[1:]
    fd, rank, size = int(fd), int(rank), int(size)
    torch.set_num_threads(1)
    other = join_group(from_plain(Rendezvous, json.loads(where)), rank, 30.0)
    if case == "lacking" and rank == 1:
        os.close(fd)
        fd = None
    group = share_memory(other, fd, rank, size, 1.0 if case == "killed" else 20.0)
    assert case == "lacking" or isinstance(group, SharedMemoryGroup)
    print(json.dumps(globals()[case](TensorParallel(rank, size, group), other)))


main()
