"""Tensors packed, until a pack is over its size, into one broadcast each."""

import torch

PACK_BYTES = 1 << 30


def packed_nccl_broadcast_producer(
    iterator, group, src, post_iter_func, buffer_size_bytes=PACK_BYTES, num_buffers=2
):
    pack, size = [], 0
    for item in iterator:
        pack.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        size += pack[-1].numel()
        if size > buffer_size_bytes:
            group.broadcast(torch.cat(pack), src=src)
            pack, size = [], 0
    if pack:
        group.broadcast(torch.cat(pack), src=src)
