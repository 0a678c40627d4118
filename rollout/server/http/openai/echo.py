"""What older completions do beside going on: repeat the prompt, and choose the best of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from rollout.generation import Completion, Logprobs, RequestOutput
from rollout.server.http.finite import finite
from rollout.server.http.parsers import Decode

TokenText = Callable[[int], str]


def best_of(output: RequestOutput, count: int) -> RequestOutput:
    """The ``count`` samples with the highest logprob per token, best first."""
    if len(output.outputs) <= count:
        return output

    def each_token(made: Completion) -> float:
        return made.cumulative_logprob / max(1, len(made.token_ids))

    ranked = sorted(output.outputs, key=each_token, reverse=True)[:count]
    return replace(output, outputs=[replace(one, index=n) for n, one in enumerate(ranked)])


def without_answer(output: RequestOutput) -> RequestOutput:
    """The prompt alone, of a request that wanted no token and had to draw one."""
    empty = [
        replace(
            one,
            text="",
            token_ids=[],
            logprobs=Logprobs([], [], [], None),
            cumulative_logprob=0.0,
            weight_versions=(),
            sampling_mask=None,
        )
        for one in output.outputs
    ]
    return replace(output, outputs=empty)


def prompt_text(
    given: str | Sequence[int], ids: Sequence[int], decode: Decode | None, token_text: TokenText
) -> str:
    """What was ``given``, or where that is no text its ``ids`` as one: a character may be several
    tokens.
    """
    if isinstance(given, str):
        return given
    return "".join(map(token_text, ids)) if decode is None else decode(ids)


def prepend_prompt(
    choice: dict[str, Any], output: RequestOutput, text: str, token_text: TokenText, top: int
) -> None:
    """Put the prompt's ``text``, and its tokens' raw logprobs, before those of ``choice``.

    The three lists of RL's logprobs stay those of what was generated.
    """
    choice["text"] = text + choice["text"]
    found = choice["logprobs"]
    if found is None:
        return
    texts = [token_text(token) for token in output.prompt_token_ids]
    starts = list(accumulate(map(len, texts), initial=0))
    rows = output.prompt_logprobs or [None] * len(texts)
    pairs = list(zip(output.prompt_token_ids, rows, strict=True))
    values = [None if row is None else finite(row[token]) for token, row in pairs]
    found["text_offset"] = [*starts[:-1], *(starts[-1] + at for at in found["text_offset"])]
    found["tokens"] = texts + found["tokens"]
    found["token_logprobs"] = values + found["token_logprobs"]
    tops = [None if row is None else _top(token, row, token_text, top) for token, row in pairs]
    found["top_logprobs"] = tops + found["top_logprobs"]


def _top(
    token: int, row: Mapping[int, float], token_text: TokenText, top: int
) -> dict[str, float | None]:
    ranked = sorted(row.items(), key=lambda item: -item[1])[:top]
    made = {token_text(other): finite(p) for other, p in ranked}
    made.setdefault(token_text(token), finite(row[token]))
    return made
