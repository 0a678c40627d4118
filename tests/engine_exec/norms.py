"""A user's class, whose methods ranks run."""

import os
import sys
import time

import torch


class Norms:
    def echo(self, *args, **kwargs):
        return [self.rank, self.world_size, str(self.device), list(args), kwargs]

    def environment(self, *names):
        return [os.environ.get(name) for name in names]

    def norm(self, name):
        assert not torch.is_grad_enabled()
        return dict(self.model.named_parameters())[name].double().sum().item()

    def fail_on(self, rank):
        if rank == self.rank:
            raise KeyError("nothing of that name")
        return self.rank

    def tensor(self):
        return torch.zeros(1)

    def _hidden(self):
        return "not to be called"

    def sleep(self, seconds):
        time.sleep(seconds)

    def vanish(self):
        sys.exit(3)


class TakesRank:
    rank = 3

    def model(self):
        return None


class TakesMore:
    def __init__(self, more):
        self.more = more
