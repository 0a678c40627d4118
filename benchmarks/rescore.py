"""Logprobs of sampled tokens computed again by transformers, from the weights that made them.

Under ``in_flight="keep"`` a completion's KV was computed by several versions. It is rebuilt the
same way: each span of positions is run by its own version's weights over the cache that earlier
spans left behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

KEPT_MODELS = 6
TOLERANCE = 3e-4  # of a float32 logprob, between two implementations


@dataclass
class Scores:
    """Tokens ``checked``, by how many versions their context had; ``unknown`` had it recomputed."""

    checked: int = 0
    mixed: int = 0
    unknown: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Rescorer:
    """``weights_of(version)`` gives the complete weights of a version, in file form."""

    def __init__(self, path: str, weights_of: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._path, self._weights_of = path, weights_of
        self._models: OrderedDict[int, torch.nn.Module] = OrderedDict()
        self.scores = Scores()

    def check(self, prompt: list[int], completion) -> None:
        """One completion: spans must cover it, and every token's logprob come out again."""
        ids = [*prompt, *completion.token_ids]
        made = _expanded(completion.weight_versions)
        computed = _expanded(completion.kv_spans)
        scores = self.scores
        if len(made) != len(completion.token_ids) or not len(ids) - 1 <= len(computed) <= len(ids):
            scores.wrong.append(
                f"spans of {len(made)} and {len(computed)} for {len(ids)} positions"
            )
            return
        logprobs = self._logprobs(ids, completion.kv_spans)
        for number, (token, version) in enumerate(zip(completion.token_ids, made, strict=True)):
            at = len(prompt) + number - 1  # the position whose logits gave this token
            if computed[at] != version:
                scores.unknown += 1  # recomputed since by newer weights: its context is gone
                continue
            off = abs(float(logprobs[at, token]) - completion.logprobs.raw[number])
            scores.checked += 1
            scores.mixed += computed[0] != version
            scores.worst = max(scores.worst, off)
            if off > TOLERANCE:
                scores.wrong.append(f"token {number} of v{version}: off by {off:.4f}")

    @torch.no_grad()
    def _logprobs(self, ids: list[int], spans) -> Tensor:
        """float32 [positions, vocab]: row p is what followed position p, by its own version."""
        cache, rows = DynamicCache(config=AutoConfig.from_pretrained(self._path)), []
        for span in spans:
            part = torch.tensor([ids[span.start : min(span.stop, len(ids))]])
            logits = self._model(span.version)(part, past_key_values=cache, use_cache=True).logits
            rows.append(torch.log_softmax(logits[0].float(), -1))
        return torch.cat(rows)

    def _model(self, version: int) -> torch.nn.Module:
        if version in self._models:
            self._models.move_to_end(version)
            return self._models[version]
        if len(self._models) < KEPT_MODELS:
            config = AutoConfig.from_pretrained(self._path)
            model = AutoModelForCausalLM.from_config(config).float().eval()
        else:
            _, model = self._models.popitem(last=False)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self._weights_of(version).items():
                parameters[name].copy_(value)
        self._models[version] = model
        return model


def _expanded(spans) -> list[int]:
    flat: list[int] = []
    for span in spans:
        assert span.start == len(flat), "spans do not follow each other"
        flat += [span.version] * (span.stop - span.start)
    return flat
