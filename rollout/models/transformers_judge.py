"""Whether transformers' modules over our pages say what they say alone, and how many at once.

Asked after a first load, by three short sequences: a model whose layers are not what they seem is
refused instead of served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.transformers_backend.interface import EAGER, NAME, Step
from rollout.models.transformers_backend.passes import Together

# Tokens of each step: of two sequences alike, and a shorter one between them.
STEPS = ((9, 4, 9), (4, 4, 4), (1, 1, 1))
TOLERANCE = 1e-3  # of float32 logprobs between attention over pages and transformers' own


class Judged(Protocol):
    """``TransformersCausalLM``, as far as it is asked here."""

    config: ModelConfig
    build: Build
    inner: nn.Module
    together: Together
    token_wise: bool

    @property
    def step(self) -> Step: ...

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor: ...


@torch.no_grad()
def judge(model: Judged) -> None:
    """Raise ``ConfigError`` unless pages give what transformers' own attention gives.

    Of modules that attend by themselves ``together`` and ``token_wise`` are set to the fastest way
    in which they do.
    """
    wise = (False, True) if model.config.recurrent_layers else (False,)
    ways = [(together, each) for each in wise for together in Together]
    wanted = _wanted(model)
    for way in ways if model.config.kept else ways[:1]:
        model.together, model.token_wise = way
        try:
            _compare(model, wanted)
        except ConfigError as refusal:  # of too many at once, perhaps
            error = refusal
        else:
            return
    raise error


def _compare(model: Judged, wanted: list[Tensor]) -> None:
    name = model.config.architecture
    try:
        apart = _apart(model, wanted)
    except Exception as error:
        raise ConfigError(
            f"{name} is not served: its modules fail over a cache "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    if not _is_near(apart, model.build.dtype):
        raise ConfigError(
            f"{name} is not served: over pages its logprobs differ from those of transformers' "
            f"own attention by up to {max(float(each.max()) for each in apart):.3g}"
        )


def _is_near(apart: list[Tensor], dtype: torch.dtype) -> bool:
    """Where rounding hides much, sequences together may be no farther off than each alone."""
    every = torch.cat(apart)
    if not bool(every.isfinite().all()):
        return False
    if dtype in (torch.float32, torch.float64):
        return float(every.max()) <= TOLERANCE
    together, alone = (float(each.mean(-1).max()) for each in apart[-2:])
    return float(every.mean()) <= 0.1 and together <= 2 * alone + 1e-3


def _apart(model: Judged, wanted: list[Tensor]) -> list[Tensor]:
    """By how much logprobs differ in each of ``STEPS``, and in the last with each sequence alone:
    modules that keep something of a sequence themselves show."""
    kv, done, apart = _small_cache(model), [0] * len(wanted), list[Tensor]()
    together, last = model.together, len(STEPS) - 1
    for number, counts in enumerate(STEPS):
        before = [LayerKV(one.k.clone(), one.v.clone()) for one in kv]
        apart.append(_differences(model, wanted, kv, done, counts))
        if number == last:
            model.together = Together.ONE
            apart.append(_differences(model, wanted, before, done, counts))
            model.together = together
        done = [at + n for at, n in zip(done, counts, strict=True)]
    return apart


def _differences(
    model: Judged,
    wanted: list[Tensor],
    kv: list[LayerKV],
    done: list[int],
    counts: Sequence[int],
) -> Tensor:
    """[tokens, vocab] of one step over ``kv``."""
    logprobs = model.forward(_chunks(_ids(model), done, counts), kv).float().log_softmax(-1)
    theirs = [x[at : at + n] for x, at, n in zip(wanted, done, counts, strict=True)]
    return (logprobs - torch.cat(theirs)).abs()


def _wanted(model: Judged) -> list[Tensor]:
    """Logprobs [tokens, vocab] of each sequence alone, by transformers' own attention."""
    inner: Any = model.inner
    by_interface = model.config.kept is None
    if by_interface:
        inner.set_attn_implementation(EAGER)
    model.step.positions = None  # as the modules count by themselves
    try:
        found = [inner(input_ids=one[None], use_cache=False).logits[0] for one in _ids(model)]
    except Exception as error:
        raise ConfigError(
            f"{model.config.architecture} is not served: its modules fail "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    finally:
        if by_interface:
            inner.set_attn_implementation(NAME)
    return [each[:, : model.config.vocab_size].float().log_softmax(-1) for each in found]


def _ids(model: Judged) -> tuple[Tensor, ...]:
    lengths = [sum(column) for column in zip(*STEPS, strict=True)]
    ids = torch.arange(3, 3 + sum(lengths), device=model.build.device)
    return (ids % model.config.vocab_size).split_with_sizes(lengths)


def _small_cache(model: Judged) -> list[LayerKV]:
    """Pages of one position, and slots of states."""
    config, build = model.config, model.build
    sequences, tokens = len(STEPS[0]), sum(map(sum, STEPS))
    _, heads, dim = config.cached_heads(build.tp.size)
    pages = torch.zeros(tokens, heads, 1, dim, dtype=build.dtype, device=build.device)
    kv = [LayerKV(pages.clone(), pages.clone()) for _ in range(config.num_layers)]
    for layer in config.recurrent_layers:
        assert config.recurrence is not None
        inputs, state = config.recurrence.state_shapes(build.tp.size)
        kv[layer] = LayerKV(
            torch.zeros(sequences, *inputs, dtype=build.dtype, device=build.device),
            torch.zeros(sequences, *state, device=build.device),
        )
    return kv


def _chunks(ids: Sequence[Tensor], done: list[int], counts: Sequence[int]) -> ForwardBatch:
    """The next ``counts`` tokens of each sequence, in pages of one position."""
    device = ids[0].device

    def sums(numbers: Sequence[int]) -> list[int]:
        found: list[int] = torch.tensor([0, *numbers]).cumsum(0).tolist()
        return found

    first, queries = sums([len(one) for one in ids]), sums(counts)
    longest = max(map(len, ids))
    lengths = [at + n for at, n in zip(done, counts, strict=True)]
    places = [torch.arange(*ends, device=device) for ends in zip(done, lengths, strict=True)]
    pages = torch.tensor(first[:-1])[:, None] + torch.arange(longest)
    return ForwardBatch(
        torch.cat([one[at] for one, at in zip(ids, places, strict=True)]),
        torch.cat(places),
        torch.cat([at + start for at, start in zip(places, first, strict=False)]),
        torch.tensor(queries, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        (pages % first[-1]).to(device, torch.int32),
        torch.arange(queries[-1], device=device),
        state_slots=torch.arange(len(ids), dtype=torch.int32, device=device),
    )
