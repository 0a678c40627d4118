"""Megatron-Core: tensor-, pipeline- and expert-parallel shards, sent from where they lie.

Each parameter of a ``GPTModel`` is read as views that are boxes of the checkpoint's tensors: no
rank needs more than its shard, and nothing is converted, but for one small norm (of gated delta
nets, which files do not add to one). Data- and context-parallel replicas hold the same boxes, each
of which travels once. Megatron is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import WeightMismatch
from rollout.integrations.megatron_layout import MegatronLayout
from rollout.integrations.megatron_parts import Part, Place
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.reshard_plan import gap
from rollout.weights import Box, TensorMeta
from rollout.weights.components import component_of
from rollout.wire.codec import from_plain, to_plain


class MegatronSource:
    """The weights of a Megatron-Core ``GPTModel`` as its ranks hold them: a ``LocalSource``.

    ``model_chunks``: this rank's model, or its list of virtual pipeline chunks, in Megatron's or
    torch's wrappers. ``config``: the checkpoint's Hugging Face configuration (of ``MODEL_TYPES``;
    of a model that sees images, what it says of the text), or its dict. ``tp``, ``pp``, ``ep`` and
    ``etp`` (expert tensor parallelism; as ``tp`` unless given): (rank, size) each, read from
    Megatron's ``parallel_state`` where it is initialised. ``group``: the torch group of all ranks
    that hold the model, the sender first; the default group unless given. ``mtp``: whether the
    heads that predict further tokens are sent, where the model has some: to an engine with the
    component of that name, at one commit with the policy.

    Collective over ``group``, within ``timeout`` seconds. Serves one update. Float tensors go as
    the model holds them and are cast on the way. Raises, on every rank alike, ``WeightMismatch``
    naming every parameter that no rule knows, and tensors that the ranks do not hold whole;
    ``ConfigError`` where the configuration and the model contradict each other.
    """

    def __init__(
        self, model_chunks: nn.Module | Sequence[nn.Module], *, config: Any,
        tp: Place | None = None, pp: Place | None = None, ep: Place | None = None,
        etp: Place | None = None, group: Any = None, mtp: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:  # fmt: skip
        chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        self._group = group
        self.agreement = RankGroup()
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self.agreement = RankGroup.over(tuple(ranks), timeout)
        self._parts: dict[str, list[Part]] = {}
        with self.agreement.step("megatron", timeout):
            places = {"tp": tp, "pp": pp, "ep": ep, "etp": etp}
            layout = MegatronLayout.of(config, places, alone=self.agreement.size == 1)
            for part in layout.parts(chunks, mtp):
                self._parts.setdefault(part.name, []).append(part)
        mine = {
            name: [str(p[0].values.dtype).removeprefix("torch."), p[0].shape, [q.box for q in p]]
            for name, p in self._parts.items()
        }
        said = self.agreement.exchange({"tensors": to_plain(mine)}, timeout, "megatron tensors")
        try:
            self._take([reply["tensors"] for reply in said])
        except BaseException:  # on all ranks, which have heard the same
            self.agreement.close()
            raise

    def _take(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Learn from what every rank holds: the metadata, and who sends which box of a gather."""
        metas: dict[str, TensorMeta] = {}
        have: list[dict[str, tuple[Box, ...]]] = []
        self._holders: dict[str, dict[Box, int]] = {}
        for member, tensors in enumerate(said):
            have.append({})
            for name, (dtype, shape, plain) in tensors.items():
                meta = TensorMeta(name, getattr(torch, dtype), tuple(shape))
                if metas.setdefault(name, meta) != meta:
                    raise WeightMismatch(
                        f"{name} is {meta} on rank {self.agreement.ranks[member]} and "
                        f"{metas[name]} on another; are tp, pp, ep and etp right?"
                    )
                have[-1][name] = from_plain(tuple[Box, ...], plain)
                for box in have[-1][name]:
                    self._holders.setdefault(name, {}).setdefault(box, member)
        self._metadata = tuple(metas.values())
        if (problem := gap(self._metadata, have)) is not None:
            raise WeightMismatch(f"{problem}; are tp, pp, ep and etp those of the model?")

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(component_of(meta.name) for meta in self._metadata))

    def metadata(self) -> tuple[TensorMeta, ...]:
        return self._metadata

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(m.name, [p.box for p in self._parts.get(m.name, ())]) for m in self._metadata]

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        return [(part.box, part.values) for part in self._parts.get(name, ())]

    held_values = local_values  # a part's values are the model's, or this source's own

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """One gather for each tensor, for what cannot read boxes where they lie."""
        for meta in self._metadata:
            yield meta.name, self._gathered(meta)

    def _gathered(self, meta: TensorMeta) -> Tensor:
        """A tensor whole on the first rank, whose own boxes do not travel; "meta" elsewhere."""
        mine, here = dict(self.local_values(meta.name)), self.agreement
        if not here.is_sender:
            for box, holder in self._holders[meta.name].items():
                if holder == here.rank:
                    dist.send(mine[box].contiguous(), here.ranks[0], self._group)
            return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        device = next(iter(self._parts.values()))[0].values.device
        full = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        for box, holder in self._holders[meta.name].items():
            values = mine.get(box)
            if values is None:
                values = torch.empty(box.shape, dtype=meta.dtype, device=device)
                dist.recv(values, here.ranks[holder], self._group)
            full[box.slices].copy_(values)
        return full
