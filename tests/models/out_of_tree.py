"""A small decoder as somebody else would write it, to vLLM's contract for weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Packed(nn.Module):
    """Rows of several linears, each split over ranks, one after the other."""

    def __init__(self, build, inputs: int, sizes: dict) -> None:
        super().__init__()
        self.tp, self.sizes = build.tp, sizes
        rows = sum(sizes.values()) // build.tp.size
        self.weight = nn.Parameter(torch.empty(rows, inputs))
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight, loaded_shard_id) -> None:
        size, at = self.sizes[loaded_shard_id] // self.tp.size, 0
        for shard, rows in self.sizes.items():
            if shard == loaded_shard_id:
                break
            at += rows // self.tp.size
        part = loaded_weight.narrow(0, self.tp.rank * size, size)
        data = param.data.narrow(0, at, size)
        assert data.shape == part.shape
        data.copy_(part)


class Row(nn.Module):
    def __init__(self, build, inputs: int, outputs: int) -> None:
        super().__init__()
        self.tp = build.tp
        self.weight = nn.Parameter(torch.empty(outputs, inputs // build.tp.size))
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight) -> None:
        size = param.data.shape[1]
        param.data.copy_(loaded_weight.narrow(1, self.tp.rank * size, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(F.linear(x, self.weight))


class Vocab(nn.Module):
    def __init__(self, build, rows: int, hidden: int) -> None:
        super().__init__()
        self.tp, self.total = build.tp, rows
        self.rows = -(-rows // build.tp.size)
        self.weight = nn.Parameter(torch.empty(self.rows, hidden))
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight) -> None:
        first = self.tp.rank * self.rows
        count = min(self.rows, self.total - first)
        param[:count].data.copy_(loaded_weight[first : first + count])
        param[count:].data.fill_(0)

    def embed(self, ids: Tensor) -> Tensor:
        local = ids - self.tp.rank * self.rows
        here = (local >= 0) & (local < self.rows)
        x = F.embedding(local.clamp(0, self.rows - 1), self.weight)
        return self.tp.all_reduce(x.masked_fill(~here[:, None], 0))


class Block(nn.Module):
    """A feed-forward alone: what is tested here is how weights get in."""

    def __init__(self, build) -> None:
        super().__init__()
        hidden, inner = build.config.hidden_size, build.config.intermediate_size
        self.norm = nn.Parameter(torch.empty(hidden))
        self.gate_up_proj = Packed(build, hidden, {0: inner, 1: inner})
        self.down_proj = Row(build, inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x * self.norm, self.gate_up_proj.weight).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class OutsideForCausalLM(nn.Module):
    """Without a ``load_weights`` of its own: its parameters know how they are loaded."""

    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, build, max_len: int) -> None:
        super().__init__()
        config = build.config
        self.tp, self.vocab = build.tp, config.vocab_size
        self.embed = Vocab(build, config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(build) for _ in range(config.num_layers))
        self.head = Vocab(build, config.vocab_size, config.hidden_size)

    def forward(self, batch, kv) -> Tensor:
        x = self.embed.embed(batch.input_ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(x[batch.logit_rows], self.head.weight)
        return self.tp.all_gather(logits)[:, : self.vocab]


class OwnLoading(OutsideForCausalLM):
    """The same with its own ``load_weights``, which remembers what it was given."""

    def __init__(self, build, max_len: int) -> None:
        super().__init__(build, max_len)
        self.given: list[tuple[str, tuple[int, ...]]] = []

    def load_weights(self, weights) -> set[str]:
        params, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            self.given.append((name, tuple(tensor.shape)))
            for shard, part in enumerate(("gate_proj", "up_proj")):
                if part in name.split("."):
                    name = name.replace(part, "gate_up_proj")
                    params[name].weight_loader(params[name], tensor, shard)
                    break
            else:
                loader = getattr(params[name], "weight_loader", None)
                (loader or (lambda p, t: p.data.copy_(t)))(params[name], tensor)
            loaded.add(name)
        return loaded


class Doubling(OwnLoading):
    """Changes what it loads: no digest of it could be compared."""

    def load_weights(self, weights) -> set[str]:
        return super().load_weights((name, 2 * tensor) for name, tensor in weights)


class Forgetful(OwnLoading):
    """Takes the first half of a tensor and leaves the rest as it was."""

    def load_weights(self, weights) -> set[str]:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if name.endswith("norm"):
                half = len(tensor) // 2
                params[name].data[:half].copy_(tensor[:half])
            else:
                super().load_weights([(name, tensor)])
        return set(params)
