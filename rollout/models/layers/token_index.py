"""The index of sparse attention: small keys, by which a query chooses the tokens it attends to."""

from __future__ import annotations

from torch import Tensor, nn

from rollout.kernels import rope_and_cache, select_tokens
from rollout.models.config.latent import IndexConfig
from rollout.models.forward import ForwardBatch
from rollout.models.layers.attention import CosSin, apart
from rollout.models.layers.base import Build
from rollout.models.layers.linear import ReplicatedLinear
from rollout.models.layers.norm import LayerNorm

EPS = 1e-6  # of its norm, whatever the config says of the others


class TokenIndex(nn.Module):
    """Keeps a key of each token, and chooses by it; whole on every rank, no collective.

    The first dimensions of its queries and keys turn as those of attention do. ``inputs``: of the
    vector that its queries are made of. (DeepSeek-V3.2, arXiv 2512.02556, section 2.1.)
    """

    def __init__(self, build: Build, index: IndexConfig, inputs: int) -> None:
        super().__init__()
        self.index, hidden = index, build.config.hidden_size
        self.wq_b = ReplicatedLinear(build, inputs, index.heads * index.dim, tiled=True)
        self.wk = ReplicatedLinear(build, hidden, index.dim, tiled=True)
        self.k_norm = LayerNorm(build, index.dim, EPS, bias=True)
        self.weights_proj = ReplicatedLinear(build, hidden, index.heads)

    def forward(
        self, x: Tensor, vector: Tensor, cos_sin: CosSin, batch: ForwardBatch, pages: Tensor
    ) -> None:
        """Write the keys of x [T, hidden] to ``pages``, and what each of ``vector`` [T, inputs]
        attends to into ``batch.chosen``: None where no table has room for more than that.
        """
        assert batch.chosen is not None
        key = self._apart(self.k_norm(self.wk(x))[:, None], cos_sin)
        room = batch.block_tables.shape[1] * pages.shape[2]
        chooses = room > self.index.most
        q = (
            self._apart(self.wq_b(vector).unflatten(1, (-1, self.index.dim)), cos_sin)
            if chooses
            else key
        )
        q = rope_and_cache(q, key, None, *cos_sin, pages, None, batch.slot_mapping)
        slots = counts = None
        if chooses:
            weights = self.weights_proj(x).float()
            places = batch.query_starts, batch.context_lens, batch.block_tables
            slots, counts = select_tokens(q, weights, pages, *places, self.index.most)
        batch.chosen.slots, batch.chosen.counts = slots, counts

    def _apart(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        return apart(x, cos_sin[0].shape[1]) if self.index.interleaved else x
