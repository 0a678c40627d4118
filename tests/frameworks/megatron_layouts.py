"""A checkpoint's tensors as the ranks of Megatron-Core hold them, by its own naming rules."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[int, int]
Weights = dict[str, Tensor]
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def shard(
    weights: Weights, config: dict[str, Any], *, tp: Place, pp: Place, ep: Place, etp: Place,
    fused: bool, vocabulary: int,
) -> Weights:  # fmt: skip
    """What one rank holds. ``fused``: Transformer Engine's names; ``vocabulary``: padded rows."""
    count, last = config["num_hidden_layers"] // pp[1], pp[0] == pp[1] - 1
    found: Weights = {}
    for local in range(count):
        layer = f"model.layers.{pp[0] * count + local}."
        inner = {n.removeprefix(layer): t for n, t in weights.items() if n.startswith(layer)}
        for name, tensor in _layer(inner, config, tp, ep, etp, fused):
            found[f"decoder.layers.{local}.{name}"] = tensor
    for name, tensor in _head(weights, config, tp, ep, etp, fused) if last else ():
        found[f"mtp.layers.0.{name}"] = tensor
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    if pp[0] == 0 or (last and any(name.startswith("mtp.") for name in found)):
        found["embedding.word_embeddings.weight"] = _part(_padded(embedding, vocabulary), 0, tp)
    if last:
        found["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if "lm_head.weight" in weights or pp[1] > 1:  # else the embedding itself is used
            found["output_layer.weight"] = _part(_padded(head, vocabulary), 0, tp)
    return {name: tensor.clone() for name, tensor in found.items()}


def unstacked(weights: Weights) -> Weights:
    """With the experts of a layer one by one, where a file has them in two tensors."""
    found: Weights = {}
    for name, tensor in weights.items():
        stem, _, linear = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = tensor
            continue
        linears = ("gate_proj", "up_proj") if linear == "gate_up_proj" else (linear,)
        for index, expert in enumerate(tensor):
            for one, part in zip(linears, expert.chunk(len(linears)), strict=True):
                found[f"{stem}.{index}.{one}.weight"] = part.clone()
    return found


def gpt_model(named: Weights, hf: dict[str, Any]) -> nn.Module:
    """A ``tree`` with the settings of Megatron's that say how its values are meant."""
    root, hybrid = tree(named), hf["model_type"] in HYBRIDS
    root.config = SimpleNamespace(
        layernorm_zero_centered_gamma=hybrid, attention_output_gate=hybrid
    )
    return root


def tree(named: Weights) -> nn.Module:
    """Modules in which these are the parameters of these names."""
    root, below = nn.Module(), dict[str, Weights]()
    for name, tensor in named.items():
        first, _, rest = name.partition(".")
        if rest:
            below.setdefault(first, {})[rest] = tensor
        else:
            root.register_parameter(name, nn.Parameter(tensor))
    children = {name: tree(inner) for name, inner in below.items()}
    if children and all(name.isdigit() for name in children):
        return nn.ModuleList(children[str(i)] for i in range(len(children)))
    for name, child in children.items():
        root.add_module(name, child)
    return root


def _layer(
    inner: Weights, config: dict[str, Any], tp: Place, ep: Place, etp: Place, fused: bool
) -> Iterator[tuple[str, Tensor]]:
    if "kv_lora_rank" in config:
        yield from _latent(inner, tp, fused)
    delta = "linear_attn.A_log" in inner
    if delta:
        yield from _delta_net(inner, config, tp)
    for kind in ("weight", "bias"):
        if f"self_attn.k_proj.{kind}" in inner:
            yield f"self_attention.linear_qkv.{kind}", _part(_qkv(inner, kind, config), 0, tp)
    if not delta:
        yield "self_attention.linear_proj.weight", _part(inner["self_attn.o_proj.weight"], 1, tp)
    for one in "qk":
        if f"self_attn.{one}_norm.weight" in inner:
            yield f"self_attention.{one}_layernorm.weight", inner[f"self_attn.{one}_norm.weight"]
    linear = "in_proj" if delta else "linear_qkv"
    before = f"self_attention.{linear}.layer_norm_weight" if fused else "input_layernorm.weight"
    latent = "self_attn.kv_b_proj.weight" in inner
    yield "input_layernorm.weight" if latent else before, inner["input_layernorm.weight"]
    experts = [name for name in inner if ".gate.weight" in name]
    after = "mlp.linear_fc1.layer_norm_weight" if fused and not experts else None
    yield after or "pre_mlp_layernorm.weight", inner["post_attention_layernorm.weight"]
    if not experts:
        linears = [inner[f"mlp.{linear}_proj.weight"] for linear in ("gate", "up", "down")]
        for which, tensor in _mlp(*linears, tp):
            yield f"mlp.linear_fc{which}.weight", tensor
        return
    yield "mlp.router.weight", inner[experts[0]]
    if "mlp.gate.e_score_correction_bias" in inner:
        yield "mlp.router.expert_bias", inner["mlp.gate.e_score_correction_bias"]
    for shared in ("mlp.shared_expert", "mlp.shared_experts"):
        if f"{shared}.up_proj.weight" in inner:
            linears = [inner[f"{shared}.{linear}_proj.weight"] for linear in ("gate", "up", "down")]
            for which, tensor in _mlp(*linears, tp):
                yield f"mlp.shared_experts.linear_fc{which}.weight", tensor
    if "mlp.shared_expert_gate.weight" in inner:
        yield "mlp.shared_experts.gate_weight", inner["mlp.shared_expert_gate.weight"]
    module = experts[0].removesuffix("gate.weight") + "experts"
    spelled = (
        ("w1", "w3", "w2") if "w1" in str(list(inner)) else ("gate_proj", "up_proj", "down_proj")
    )
    total = next(
        config[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(n)
    )
    each = total // ep[1]
    for local in range(each):
        own = f"{module}.{ep[0] * each + local}"
        for which, tensor in _mlp(*(inner[f"{own}.{linear}.weight"] for linear in spelled), etp):
            if fused:
                yield f"mlp.experts.linear_fc{which}.weight{local}", tensor
            else:
                yield f"mlp.experts.local_experts.{local}.linear_fc{which}.weight", tensor


def _head(
    weights: Weights, config: dict[str, Any], tp: Place, ep: Place, etp: Place, fused: bool
) -> Iterator[tuple[str, Tensor]]:
    """Of the layer behind the last, or of Qwen's head, where there is one."""
    layer = f"model.layers.{config['num_hidden_layers']}."
    if "mtp.fc.weight" in weights:
        layer = "mtp.layers.0."
        beside = {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "shared_head.norm": "norm",
            "eh_proj": "fc",
        }
        weights = weights | {
            f"{layer}{of}.weight": weights[f"mtp.{name}.weight"] for of, name in beside.items()
        }
    inner = {n.removeprefix(layer): t for n, t in weights.items() if n.startswith(layer)}
    if not inner:
        return
    yield "enorm.weight", inner["enorm.weight"]
    yield "hnorm.weight", inner["hnorm.weight"]
    yield "final_layernorm.weight", inner["shared_head.norm.weight"]
    yield "eh_proj.weight", _part(inner["eh_proj.weight"], 0, tp)
    for name, tensor in _layer(inner, config, tp, ep, etp, fused):
        yield f"transformer_layer.{name}", tensor


def _latent(inner: Weights, tp: Place, fused: bool) -> Iterator[tuple[str, Tensor]]:
    """``fused``: as Transformer Engine has it, whose linears into the latent space are not cut."""
    for kind in ("q", "kv"):
        down = {"q": "q_a_proj", "kv": "kv_a_proj_with_mqa"}[kind]
        if f"self_attn.{down}.weight" not in inner:
            yield (
                "self_attention.linear_q_proj.weight",
                _part(inner["self_attn.q_proj.weight"], 0, tp),
            )
            continue
        into = inner[f"self_attn.{down}.weight"]
        yield (
            f"self_attention.linear_{kind}_down_proj.weight",
            into if fused else _part(into, 0, tp),
        )
        norm = f"linear_{kind}_up_proj.layer_norm_weight" if fused else f"{kind}_layernorm.weight"
        yield f"self_attention.{norm}", inner[f"self_attn.{kind}_a_layernorm.weight"]
        out = _part(inner[f"self_attn.{kind}_b_proj.weight"], 0, tp)
        yield f"self_attention.linear_{kind}_up_proj.weight", out


def _qkv(inner: Weights, kind: str, config: dict[str, Any]) -> Tensor:
    """Group by group: the group's queries, the gates of their output, its key, its value."""
    groups, dim = config["num_key_value_heads"], config["head_dim"]
    q, k, v = (inner[f"self_attn.{one}_proj.{kind}"] for one in "qkv")
    halves = [q]
    if config["model_type"] in HYBRIDS:  # head by head: its query, its gate
        halves = [half.flatten(0, 1) for half in q.unflatten(0, (-1, 2, dim)).unbind(1)]
    parts = []
    for group in range(groups):
        parts += [one.chunk(groups)[group] for one in (*halves, k, v)]
    return torch.cat(parts)


def _delta_net(inner: Weights, config: dict[str, Any], tp: Place) -> Iterator[tuple[str, Tensor]]:
    """Of this rank's heads: q, k, v, z, b and a, each of all heads; a norm that is added to one."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    rows = [keys * key_dim, keys * key_dim, values * dim]
    own = {name.removeprefix("linear_attn."): t for name, t in inner.items()}
    if "in_proj_qkvz.weight" in own:
        each = [key_dim, key_dim, values // keys * dim, values // keys * dim]
        by_key = own["in_proj_qkvz.weight"].unflatten(0, (keys, -1)).split(each, 1)
        parts = [part.flatten(0, 1) for part in by_key]
        gates = own["in_proj_ba.weight"].unflatten(0, (keys, 2, -1)).unbind(1)
        parts += [gate.flatten(0, 1) for gate in gates]
    else:
        parts = list(own["in_proj_qkv.weight"].split(rows))
        parts += [own[f"in_proj_{one}.weight"] for one in "zba"]
    yield "self_attention.in_proj.weight", torch.cat([_part(one, 0, tp) for one in parts])
    convolved = [_part(one, 0, tp) for one in own["conv1d.weight"].split(rows)]
    yield "self_attention.conv1d.weight", torch.cat(convolved)
    for name in ("A_log", "dt_bias"):
        yield f"self_attention.{name}", _part(own[name], 0, tp)
    yield "self_attention.out_norm.weight", own["norm.weight"] - 1
    yield "self_attention.out_proj.weight", _part(own["out_proj.weight"], 1, tp)


def _mlp(gate: Tensor, up: Tensor, down: Tensor, place: Place) -> Iterator[tuple[str, Tensor]]:
    yield "1", torch.cat([_part(gate, 0, place), _part(up, 0, place)])
    yield "2", _part(down, 1, place)


def _part(tensor: Tensor, axis: int, place: Place) -> Tensor:
    return tensor.chunk(place[1], axis)[place[0]]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, torch.full((rows - len(tensor), tensor.shape[1]), 7.0)])
