"""The mixture-of-experts feed-forward that the sparse architectures share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollout.kernels import finish_sums
from rollout.kernels.batch_invariant_linear import tree_sum
from rollout.models.config.moe import MoEConfig
from rollout.models.decoder.blocks import make_mlp
from rollout.models.forward import RoutedExperts
from rollout.models.layers.activations import sigmoid
from rollout.models.layers.base import Build
from rollout.models.layers.experts import make_experts
from rollout.models.layers.linear import ReplicatedLinear
from rollout.models.layers.router import Router


class SparseMoE(nn.Module):
    """Each token through its likeliest experts, and through the shared one where there is one.

    [T, hidden] -> [T, hidden]; one all-reduce, of both together.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, moe = build.config, build.config.moe
        assert moe is not None, f"{config.architecture} needs the configuration of its experts"
        self.tp, self.moe, self.shared = build.tp, moe, moe.arch.shared
        self.deterministic = build.deterministic
        self._add(moe.arch.router, Router(build, moe))
        self.experts = make_experts(build)
        if moe.narrow:
            self.fc1_latent_proj = ReplicatedLinear(build, config.hidden_size, moe.narrow)
            self.fc2_latent_proj = ReplicatedLinear(build, moe.narrow, config.hidden_size)
            self.fc2_latent_proj.of_parts = True
        self.beside: tuple[nn.Module, ...] = ()  # a tuple, which registers no module here
        if self.shared is not None:
            shared = make_mlp(build, moe.shared_size, reduce=False)
            if self.shared.beside:
                self.beside = (shared,)
            else:
                self.add_module(self.shared.name, shared)
            if self.shared.gated:
                gate = ReplicatedLinear(build, config.hidden_size, 1)
                self.add_module(f"{self.shared.name}_gate", gate)

    def forward(self, x: Tensor, experts: RoutedExperts | None = None) -> Tensor:
        router = self.get_submodule(self.moe.arch.router)
        assert isinstance(router, Router)
        forced = None if experts is None else experts.forced
        chosen, weights = route(
            *(router(x), self.moe, router.e_score_correction_bias, forced),
            deterministic=self.deterministic,
        )
        if experts is not None:
            experts.add(chosen)
        if not self.moe.arch.wide_weights:
            weights = weights.to(x.dtype)
        scaled = self.moe.arch.scaled_inputs and not self.deterministic
        run = self._of_scaled if scaled else self.experts
        if self.moe.narrow:  # of a part of the sum that all ranks make, too
            out: Tensor = self.fc2_latent_proj(run(self.fc1_latent_proj(x), chosen, weights))
        else:
            out = run(x, chosen, weights)
        if self.shared is not None:
            module = self.beside[0] if self.beside else getattr(self, self.shared.name)
            shared: Tensor = module(x)
            if self.shared.gated:
                gate = getattr(self, f"{self.shared.name}_gate")(x)
                shared = (sigmoid if self.deterministic else torch.sigmoid)(gate) * shared
            out = out + shared
        if self.deterministic:  # the lanes of both
            whole = self.tp.tree_sum(tree_sum(list(out.unbind())))
            return finish_sums(whole, None, x.dtype)
        return self.tp.all_reduce(out)

    def _add(self, path: str, module: nn.Module) -> None:
        """``module`` as the submodule ``path``, within another one where that has a dot."""
        holder, _, name = path.rpartition(".")
        if holder:
            self.add_module(holder, nn.Module())
        self.get_submodule(holder).add_module(name, module)

    def _of_scaled(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum of what experts make of inputs that were multiplied by their weights."""
        inputs = (x[:, None] * weights.to(x.dtype)[..., None]).flatten(0, 1)  # [T k, hidden]
        alone = chosen.reshape(-1, 1)
        out: Tensor = self.experts(inputs, alone, torch.ones_like(alone, dtype=x.dtype))
        return out.view(*chosen.shape, -1).sum(dim=1)


def route(
    logits: Tensor,
    moe: MoEConfig,
    bias: Tensor | None = None,
    forced: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """The chosen experts of each token and their float32 weights, both [T, experts per token].

    logits: [T, experts]; ``bias`` [experts] counts in the choice alone. Scores in float32 over all
    experts, then the choice, within the best groups where there are groups, then (where the config
    says so) the chosen scores are made to sum to one, then scaled: the order of transformers. On
    every rank the same, as the logits are. ``forced``: what is chosen instead, where it is not -1;
    the weights are the router's scores of those. ``deterministic``: no row depends on the others.
    """
    wide = logits.float()
    if moe.arch.scores == "mixer":
        return _mixed(wide, moe, forced)
    if moe.arch.scores == "sigmoid":
        scores = sigmoid(wide) if deterministic else wide.sigmoid()
    else:
        scores = wide.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if moe.groups > 1:
        choice = _within_groups(choice, moe)
    chosen = choice.topk(moe.experts_per_token, dim=-1).indices
    if forced is not None:
        chosen = torch.where(forced < 0, chosen, forced)
    weights = scores.gather(1, chosen)
    if moe.norm_topk_prob:
        # Softmax scores of the likeliest are never all zero; sigmoids may be.
        least = 1e-20 if moe.arch.scores == "sigmoid" else 0.0
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least)
    return chosen, weights if moe.scaling == 1.0 else weights * moe.scaling


def _mixed(logits: Tensor, moe: MoEConfig, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """The likeliest, then the next; each weighs by its softmax among the experts near to it.

    Near: (its logit - theirs) / max(|theirs|, its) is at most ``nearness``. Source: SparseMixer
    (arXiv 2409.12136) without its sampling, as transformers' Phi-MoE has it.
    """
    left, chosen, weights = logits, [], []
    for place in range(moe.experts_per_token):
        best, index = left.max(dim=-1, keepdim=True)
        if forced is not None:
            told = forced[:, place, None]
            index = torch.where(told < 0, index, told)
            best = left.gather(-1, index)
        far = (best - logits) / logits.abs().clamp(min=best) > moe.nearness
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(chosen, dim=-1), torch.cat(weights, dim=-1)


def _within_groups(choice: Tensor, moe: MoEConfig) -> Tensor:
    """``choice`` [T, experts], minus infinity outside each token's best groups."""
    grouped = choice.view(len(choice), moe.groups, -1)  # [T, groups, experts of one]
    best = grouped.topk(2 if moe.arch.groups == "top2" else 1, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(moe.top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
