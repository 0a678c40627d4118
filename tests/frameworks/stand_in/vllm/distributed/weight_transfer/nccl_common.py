"""The trainer's place in the group: rank 0, which listens and waits for all members."""

from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

LIMIT = timedelta(seconds=60)


class Communicator:
    """As much of ``PyNcclCommunicator`` as a sender uses."""

    def __init__(self, store, size):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = LIMIT
        self.group = SimpleNamespace(store=store, socket=None)
        self._gloo = dist.ProcessGroupGloo(store, 0, size, options)

    def broadcast(self, tensor, src):
        self._gloo.broadcast(tensor, src).wait()


def trainer_init(init_info):
    host, port = init_info["master_address"], init_info["master_port"]
    size = init_info["world_size"]
    store = dist.TCPStore(host, port, size, is_master=True, timeout=LIMIT, use_libuv=False)
    return Communicator(store, size)
