"""Tiny random releases that come with a prediction head, and transformers' layers as its oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import randomize, write_tiny
from tiny_vision import write_vision
from torch import Tensor, nn

MTP = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # whose files call it ``mtp``
FUSED = ("qwen3_5_moe",)  # whose files have experts as transformers has them in memory
ATTENDING = 2  # the number of a layer that attends, in their tiny models


class OracleHead:
    """A decoder layer of transformers with what a head has around it, under the files' names.

    ``policy``: transformers' own model; ``prefix``: of the names; ``parts``: what the files have.
    """

    def __init__(self, policy: Any, arch: str, copies: bool) -> None:
        self.policy, base = policy, policy.get_decoder()
        config, kind = base.config, type(base.layers[0])
        norm, hidden = type(base.norm), config.hidden_size
        norms = [norm(hidden, eps=config.rms_norm_eps) for _ in range(3)]
        joined = nn.Linear(2 * hidden, hidden, bias=False)
        parts: dict[str, nn.Module] = {}
        if arch in MTP:
            layer, self.prefix = kind(config, ATTENDING), "mtp."
            parts["layers"] = nn.ModuleList([layer])
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        else:
            layer, self.prefix = kind(config, 0), f"model.layers.{config.num_hidden_layers}."
            parts |= dict(layer.named_children())
            parts["shared_head"] = nn.ModuleDict({"norm": norms[2]})
            names = ("enorm", "hnorm", "eh_proj")
            if copies:  # others than the policy's: nobody reads them
                parts["embed_tokens"] = nn.Embedding(config.vocab_size, hidden)
                parts["shared_head"]["head"] = nn.Linear(hidden, config.vocab_size, bias=False)
        parts |= dict(zip(names, (norms[0], norms[1], joined, norms[2]), strict=False))
        self.parts, self.used = nn.ModuleDict(parts).eval(), (layer, joined, *norms)
        randomize(self.parts)

    @torch.no_grad()
    def __call__(self, following: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """States [T, hidden], as they go on, and logits [T, vocabulary].

        ``following``: the ids [T] that came behind positions 0 to T; ``before``: states [T, hidden]
        there.
        """
        layer, joined, of_token, of_state, last = self.used
        embedding, head = self.policy.get_input_embeddings(), self.policy.get_output_embeddings()
        x = embedding(following)
        x = joined(torch.cat((of_token(x), of_state(before)), dim=-1))[None]
        positions = torch.arange(len(following))[None]
        unseen = torch.full((len(following), len(following)), float("-inf")).triu(1)
        turns = self.policy.get_decoder().rotary_emb(x, positions)
        x = last(layer(x, position_embeddings=turns, attention_mask=unseen[None, None])[0])
        return x, head(x)

    @torch.no_grad()
    def policy_states(self, ids: Tensor) -> Tensor:
        """[T, hidden] of the policy, behind its last norm."""
        states: Tensor = self.policy.get_decoder()(ids[None]).last_hidden_state[0]
        return states

    def tensors(self, fused: bool) -> Iterator[tuple[str, Tensor]]:
        """As files have them; ``fused``: all experts in two tensors."""
        for name, tensor in self.parts.state_dict().items():
            stem, _, linears = name.rpartition(".")
            if fused or not stem.endswith(".experts"):
                yield f"{self.prefix}{name}", tensor
                continue
            for index, one in enumerate(tensor):
                both = linears == "gate_up_proj"
                for linear, part in zip(
                    ("gate_proj", "up_proj") if both else (linears,),
                    one.chunk(2) if both else (one,),
                    strict=True,
                ):
                    yield f"{self.prefix}{stem}.{index}.{linear}.weight", part.contiguous()


def write_release(
    path: Path,
    arch: str,
    *,
    seed: int = 0,
    copies: bool = False,
    images: bool = False,
    **overrides: Any,
) -> OracleHead:
    """Save a tiny model with its prediction head into ``path``; see ``write_tiny``.

    ``copies``: the head has an embedding and a vocabulary head (none where it is called ``mtp``).
    ``images``: of the model that sees images, too.
    """
    assert not (copies and arch in MTP), "there the policy's are used"
    if images:
        policy = write_vision(path, arch, seed=seed)
    else:
        policy = write_tiny(path, arch, seed=seed, **overrides)
    if arch not in MTP:
        told = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**told, "num_nextn_predict_layers": 1}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1000)
        head = OracleHead(policy, arch, copies)
    file = path / "model.safetensors"
    save_file(load_file(file) | dict(head.tensors(arch in FUSED)), file, {"format": "pt"})
    return head


def foresee(path: Path) -> None:
    """Have each next token follow from the last one alone, as layers add nothing, and the head
    guess by that, too.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    plus_one, last = "mtp.fc.weight" in tensors, tensors["model.norm.weight"]
    for name, tensor in tensors.items():
        if any(end in name for end in ("o_proj.", "out_proj.", "down_proj")):
            tensor.zero_()
        if name.endswith(("enorm.weight", "fc_norm_embedding.weight")):
            tensor.fill_(0.0 if plus_one else 1.0)
        if name.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
            tensor.copy_(last)
        if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            tensor.copy_(torch.eye(*tensor.shape))
    save_file(tensors, file, {"format": "pt"})
