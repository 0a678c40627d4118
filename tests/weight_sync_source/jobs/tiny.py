"""A small decoder with the names of a checkpoint; the same seed gives the same bits everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ALIASES = {"lm_head.weight": "model.embed_tokens.weight"}


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.up_proj = nn.Linear(hidden, 3 * hidden, bias=True)
        self.down_proj = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.up_proj(self.input_layernorm(x)).relu())


class Body(nn.Module):
    def __init__(self, hidden: int, vocab: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.register_buffer("correction", torch.randn(5))
        self.register_buffer("inv_freq", torch.randn(4))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) + self.correction.sum()


class Tiny(nn.Module):
    """Odd sizes, so that no shard is even; the head is tied when asked."""

    def __init__(self, tied: bool = True, hidden: int = 10, vocab: int = 33, layers: int = 2):
        super().__init__()
        torch.manual_seed(7)
        self.model = Body(hidden, vocab, layers)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))


def expected(model: nn.Module, dtype: torch.dtype, tied: bool = True) -> dict[str, Tensor]:
    """What an update must carry: the state dict without derived and tied entries, cast."""
    state = {k: v.detach().to(dtype) for k, v in model.state_dict().items()}
    state.pop("model.inv_freq")
    if tied:
        state.pop("lm_head.weight")
    return state
