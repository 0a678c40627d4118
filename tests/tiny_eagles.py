"""Tiny random EAGLE-3 heads, of transformers' Llama parts, which are their oracle, too."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import randomize, write_tiny
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

SPECULATORS = "layers.0"  # what speculators calls the layer


class OracleEagle:
    """A head of ``policy``, transformers' own model, under the files' names.

    ``targets``: the policy's tokens that it drafts, by its own numbers; None: all, and no map.
    ``reads``: the layers whose inputs it reads. ``embeds``: it has an embedding of its own,
    ``heads`` a vocabulary head. ``norms``: which it has beside Llama's.
    """

    def __init__(
        self,
        policy: Any,
        config: LlamaConfig,
        reads: Sequence[int],
        targets: Sequence[int] | None = None,
        *,
        layer: str = "midlayer",
        norms: Collection[str] = (),
        embeds: bool = False,
        heads: bool = True,
        fc_bias: bool = False,
    ) -> None:
        self.policy, self.reads, self.norms = policy, tuple(reads), norms
        self.targets = None if targets is None else torch.tensor(targets)
        self.vocab = policy.config.get_text_config().vocab_size
        self.layer, self.config, hidden = layer, config, config.hidden_size
        config._attn_implementation = "eager"
        self.window = getattr(config, "sliding_window", None) or 1 << 30
        attention = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * hidden, rows, bias=config.attention_bias))
        self.block = nn.ModuleDict(
            {
                "self_attn": attention,
                "mlp": LlamaMLP(config),
                **{name: self._norm() for name in ("input_layernorm", "hidden_norm")},
                "post_attention_layernorm": self._norm(),
            }
        )
        width = policy.config.get_text_config().hidden_size
        joins = len(reads) * width
        self.input_norm = self._norm(joins)
        self.fc_norm = nn.ModuleList(self._norm(width) for _ in reads)
        self.fc, self.norm = nn.Linear(joins, hidden, bias=fc_bias), self._norm()
        drafts = self.vocab if targets is None else len(targets)
        self.embed_tokens = nn.Embedding(self.vocab, hidden) if embeds else None
        self.lm_head = nn.Linear(hidden, drafts, bias=False) if heads else None
        self.parts = nn.ModuleDict({"fc": self.fc, "block": self.block, "norm": self.norm})
        if "norm_before_fc" in norms:
            self.parts["input_norm"] = self.input_norm
        if "fc_norm" in norms:
            self.parts["fc_norm"] = self.fc_norm
        for name in ("embed_tokens", "lm_head"):
            if (part := getattr(self, name)) is not None:
                self.parts[name] = part
        randomize(self.parts.eval())

    def _norm(self, size: int | None = None) -> nn.Module:
        return LlamaRMSNorm(size or self.config.hidden_size, eps=self.config.rms_norm_eps)

    @torch.no_grad()
    def policy_states(self, ids: Tensor) -> Tensor:
        """[T, states x hidden] that the policy's layers read, side by side."""
        layers, kept = self.policy.get_decoder().layers, {}
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, at=at: kept.update(
                    {at: args[0] if args else kwargs["hidden_states"]}
                ),
                with_kwargs=True,
            )
            for at, layer in enumerate(layers)
        ]
        hooks.append(
            layers[-1].register_forward_hook(
                lambda _, args, out: kept.update(
                    {len(layers): out[0] if isinstance(out, tuple) else out}
                )
            )
        )
        self.policy.get_decoder()(ids[None])
        for hook in hooks:
            hook.remove()
        return torch.cat([kept[at][0] for at in self.reads], dim=-1)

    @torch.no_grad()
    def first(self, states: Tensor) -> Tensor:
        if "norm_before_fc" in self.norms:
            states = self.input_norm(states)
        if "fc_norm" in self.norms:
            parts = states.chunk(len(self.reads), dim=-1)
            states = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], dim=-1)
        joined: Tensor = self.fc(states)
        return joined

    @torch.no_grad()
    def __call__(self, following: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """States [T, hidden], as they go on, and logits [T, the policy's vocabulary].

        ``following``: the ids [T] that came behind positions 0 to T; ``before``: [T, hidden] what
        ``first`` made of the policy's states there, or this did.
        """
        embedding = self.embed_tokens or self.policy.get_input_embeddings()
        weight: Tensor = embedding.weight  # Gemma's module multiplies what it looks up
        block, count = self.block, len(following)
        normed = block["hidden_norm"](before)
        x = torch.cat((block["input_layernorm"](weight[following]), normed), dim=-1)[None]
        at = torch.arange(count)
        seen = (at[:, None] >= at) & (at[:, None] - at < self.window)
        unseen = torch.zeros(count, count).masked_fill(~seen, float("-inf"))[None, None]
        turns = LlamaRotaryEmbedding(self.config)(x, at[None])
        attended = block["self_attn"](x, position_embeddings=turns, attention_mask=unseen)[0][0]
        x = attended + (normed if "norm_before_residual" in self.norms else before)
        x = x + block["mlp"](block["post_attention_layernorm"](x))
        head = self.lm_head or self.policy.get_output_embeddings()
        logits = head(self.norm(x))
        if "norm_output" in self.norms:
            x = self.norm(x)
        if self.targets is None:
            return x, logits
        every = torch.full((count, self.vocab), float("-inf"))
        every[:, self.targets] = logits
        return x, every

    def tensors(self) -> dict[str, Tensor]:
        """As files have them."""
        found = {
            name.replace("block.", f"{self.layer}."): tensor
            for name, tensor in self.parts.state_dict().items()
        }
        if self.targets is not None:
            found["d2t"] = self.targets - torch.arange(len(self.targets))
            known = torch.zeros(self.vocab, dtype=torch.bool)
            known[self.targets] = True
            found["t2d"] = known
        return found


def write_eagle(
    path: Path,
    policy: Any,
    reads: Sequence[int],
    targets: Sequence[int] | None = None,
    *,
    seed: int = 0,
    told: str = "top",
    architecture: str = "LlamaForCausalLMEagle3",
    layer: str = "midlayer",
    settings: dict[str, Any] | None = None,
    **oracle: Any,
) -> OracleEagle:
    """Save a tiny head of ``policy`` into ``path``.

    ``told``: where the config says what it reads: "top" or "eagle_config", else nowhere.
    ``settings``: of its layer.
    """
    text = policy.config.get_text_config()
    values: dict[str, Any] = {
        "hidden_size": text.hidden_size, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "vocab_size": text.vocab_size, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "attention_bias": False, "rope_theta": 5000.0, **(settings or {}),
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 2000)
        made = OracleEagle(policy, LlamaConfig(**values), reads, targets, layer=layer, **oracle)
    config = {"model_type": "llama", "torch_dtype": "float32", **values}
    norms = oracle.get("norms", ())
    if layer == SPECULATORS:
        config = {"transformer_layer_config": config, "speculators_model_type": "eagle3"}
        config["norm_before_residual"] = "norm_before_residual" in norms
    config |= dict.fromkeys(norms, True)
    config["architectures"] = [architecture]
    config["draft_vocab_size"] = None if targets is None else len(targets)
    numbers = "eagle_aux_hidden_state_layer_ids"
    if told == "top":
        config[numbers] = list(reads)
    elif told == "eagle_config":
        config[told] = {numbers: [layer - 1 for layer in reads], "use_aux_hidden_state": True}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_head(path, made)
    return made


def save_head(path: Path, head: OracleEagle) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in head.tensors().items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def write_simple(path: Path, seed: int = 0, num_layers: int = 4, **sizes: Any) -> Any:
    """Save a policy whose every token follows from the last one alone, as layers add nothing."""
    # Two norms are one where nothing is added to what they divide by.
    sizes |= {"num_layers": num_layers, "rms_norm_eps": 1e-9}
    policy = write_tiny(path, "llama", seed=seed, **sizes)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if any(end in name for end in ("o_proj.", "down_proj")):
            tensor.zero_()
    save_file(tensors, file, {"format": "pt"})
    return policy


#: of a head that may foresee: as many values as hidden elements, and a bias on queries and keys
FORESEES = {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-9}


@torch.no_grad()
def foresee(head: OracleEagle) -> None:
    """Have the head guess by the next token alone, as of a policy of ``write_simple``.

    It attends to its own position, where it finds what to add to the state for the token's
    embedding, normalised, to come out; of the policy's states it takes nothing.
    """
    attention = head.block["self_attn"]
    for part in head.parts.parameters():
        part.zero_()
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        head.block[norm].weight.fill_(1.0)
    for linear in (attention.q_proj, attention.k_proj):
        linear.bias.fill_(40.0)  # the product is largest where nothing is turned
    hidden = head.config.hidden_size
    attention.v_proj.weight.copy_(torch.cat((torch.eye(hidden), -torch.eye(hidden)), dim=1))
    attention.o_proj.weight.copy_(torch.eye(hidden))
    head.norm.weight.copy_(head.policy.get_decoder().norm.weight)
    if head.lm_head is not None:
        rows = head.policy.get_output_embeddings().weight
        head.lm_head.weight.copy_(rows if head.targets is None else rows[head.targets])
