"""OpenAI-shaped answers made from ``RequestOutput``; plain functions over plain values."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from rollout.generation import Completion, RequestOutput, SamplingParams, VersionSpan
from rollout.server.http.finite import finite
from rollout.server.http.openai.assistant import Message, MessageReader, delta, whole_message
from rollout.server.http.openai.echo import best_of, prepend_prompt, prompt_text, without_answer
from rollout.server.http.openai.side_channels import beside_tokens
from rollout.server.http.parsers import Decode
from rollout.server.http.responses import event

TokenText = Callable[[int], str]  # how one token reads in "logprobs"


def with_top(params: SamplingParams, mode: str) -> SamplingParams:
    """``params`` whose alternatives, if they bring some, are of that ``top_logprobs_mode``."""
    return replace(params, top_logprobs_mode=mode) if params.logprobs else params


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """What the request asked of the answer's form.

    ``logprobs``: whether to report them, and ``top``: how many alternatives. ``token_text`` names
    one token; ``samples`` is ``n``, by which choices of several prompts are numbered. ``reader``
    makes a chat's message of what was written, whose role is ``role``. ``echo``: the prompts as
    they were given, where they come first; ``answerless``: and nothing else. ``decode``: the text
    of tokens; None without a tokenizer.
    """

    model: str
    chat: bool
    samples: int
    logprobs: bool
    top: int
    processed: bool
    token_ids: bool
    token_text: TokenText
    request_id: str
    echo: Sequence[str | list[int]] = ()
    decode: Decode | None = None
    answerless: bool = False
    reader: MessageReader = field(default_factory=MessageReader)
    role: str = "assistant"
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def object_name(self) -> str:
        return "chat.completion" if self.chat else "text_completion"


def token_id_text(token: int) -> str:
    return f"token_id:{token}"


def answer(outputs: Sequence[RequestOutput], style: AnswerStyle) -> dict[str, Any]:
    """The whole answer; choices are prompt-major."""
    used = usage(outputs, style.reader)
    outputs = [best_of(output, style.samples) for output in outputs]
    if style.answerless:
        outputs = [without_answer(output) for output in outputs]
        used = usage(outputs)
    choices = [
        _choice(output, completion, index * style.samples + completion.index, style)
        for index, output in enumerate(outputs)
        for completion in output.outputs
    ]
    whole = _envelope(style, style.object_name, choices) | {"usage": used}
    if style.chat:  # vLLM's places for what a chat's choices share
        if style.token_ids:
            whole["prompt_token_ids"] = outputs[0].prompt_token_ids
        if (rows := prompt_rows(outputs[0])) is not None:
            whole["prompt_logprobs"] = rows
    return whole


def usage(outputs: Sequence[RequestOutput], reader: MessageReader | None = None) -> dict[str, Any]:
    """``reader``: of a chat's answers, for how many of their tokens are thought."""
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    made = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    used: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
    }
    thoughts = [None if reader is None else reader.thought_tokens(o) for o in outputs]
    if thoughts and None not in thoughts:
        used["completion_tokens_details"] = {"reasoning_tokens": sum(t or 0 for t in thoughts)}
    return used


class Stream:
    """Turns cumulative outputs of several prompts into events that carry only what is new.

    ``usage_always``: each chunk says how many tokens there are so far.
    """

    def __init__(self, style: AnswerStyle, *, usage_always: bool = False) -> None:
        self.style = style
        self._usage_always = usage_always
        self._last: dict[int, RequestOutput] = {}
        self._sent: dict[int, tuple[int, int]] = {}  # choice -> (characters, tokens) sent
        self._ended: set[int] = set()  # choices; later outputs repeat them while others go on
        self._messages: dict[int, Message] = {}  # choice -> what of a chat was sent
        self._offsets: dict[int, int] = {}  # choice -> where its next token's text begins
        self._kept: dict[int, _Kept] = {}
        reader = style.reader
        self._is_plain = not (
            style.logprobs or style.token_ids or usage_always or reader.reasoning or reader.calls
        )

    def events(self, prompt: int, output: RequestOutput) -> list[str]:
        """What ``output`` of prompt number ``prompt`` adds, an event for each grown choice."""
        if self.style.answerless:
            output = without_answer(output)
        self._last[prompt] = output
        made = []
        for completion in output.outputs:
            choice = prompt * self.style.samples + completion.index
            if choice in self._ended:
                continue
            first = choice not in self._sent
            chars, tokens = self._sent.get(choice, (0, 0))
            if ended := completion.finish_reason is not None:
                self._ended.add(choice)
            if len(completion.token_ids) > tokens or len(completion.text) > chars or ended:
                self._sent[choice] = (len(completion.text), len(completion.token_ids))
                grown = None if first or ended else self._grown(output, completion, choice, chars)
                if grown is None:
                    part = self._part(output, completion, choice, first, chars, tokens)
                    grown = event(self._chunk([part]))
                made.append(grown)
        return made

    def _part(
        self,
        output: RequestOutput,
        completion: Completion,
        choice: int,
        first: bool,
        chars: int,
        tokens: int,
    ) -> dict[str, Any]:
        part = _part(output, completion, choice, tokens, first, self.style)
        if self.style.chat:
            part["delta"] = self._chat_delta(output, completion, choice, first)
            _name_tool_calls(part, self._messages[choice])
        else:
            part["text"] = completion.text[chars:]
            if self.style.echo and first:
                _prepend_prompt(part, output, self.style)
            if part["logprobs"] is not None:
                begin = self._offsets.get(choice, 0)
                self._offsets[choice] = _count_offsets_from(begin, part["logprobs"])
        return part

    def _grown(
        self, output: RequestOutput, completion: Completion, choice: int, chars: int
    ) -> str | None:
        """The event of a sample that has more text, and nothing else new; None for others.

        It is the sample's event before it but for two places: one like that is made once, as any
        other is, and kept without them.
        """
        text, spans = completion.text[chars:], completion.weight_versions
        if not (self._is_plain and text and spans) or completion.sampling_mask is not None:
            return None
        last, same = spans[-1], (output.epoch, completion.staleness, completion.adapter)
        kept = self._kept.get(choice)
        if (
            kept is None
            or kept.same != same
            or kept.earlier != spans[:-1]
            or kept.last.version != last.version
            or kept.last.start != last.start
        ):
            part = _common(output, completion, choice, 0, self.style)
            part["weight_versions"][-1]["stop"] = -1  # is found again: strings' quotes are escaped
            part |= {"delta": {"content": ""}} if self.style.chat else {"text": ""}
            head, stop, rest = event(self._chunk([part])).partition('"stop": -1')
            middle, _, tail = rest.rpartition('""')
            head += stop.removesuffix("-1")
            kept = self._kept[choice] = _Kept(same, spans[:-1], last, head, middle, tail)
        if self.style.chat:
            self._messages[choice] = Message(completion.text)
        return f"{kept.head}{last.stop}{kept.middle}{json.dumps(text)}{kept.tail}"

    def _chat_delta(
        self, output: RequestOutput, completion: Completion, choice: int, first: bool
    ) -> dict[str, Any]:
        message = _message(output, completion, self.style)
        old, self._messages[choice] = self._messages.get(choice, Message()), message
        added = delta(old, message, _call_ids(self.style, choice))
        return {"role": self.style.role, "content": "", **added} if first else added

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage(list(self._last.values()), self.style.reader)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.style.chat else "text_completion"
        chunk = _envelope(self.style, name, choices)
        if self._usage_always:
            chunk["usage"] = usage(list(self._last.values()))
        return chunk


@dataclass(frozen=True, slots=True)
class _Kept:
    """A sample's event without its last span's stop and its text, and what it was made of."""

    same: tuple[int, int, str]  # epoch, staleness and adapter
    earlier: tuple[VersionSpan, ...]
    last: VersionSpan
    head: str
    middle: str
    tail: str


def _envelope(style: AnswerStyle, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": style.request_id,
        "object": name,
        "created": style.created,
        "model": style.model,
        "choices": choices,
    }


def _choice(
    output: RequestOutput, completion: Completion, index: int, style: AnswerStyle
) -> dict[str, Any]:
    choice = _common(output, completion, index, 0, style)
    if style.chat:
        message = _message(output, completion, style)
        choice["message"] = whole_message(message, _call_ids(style, index), style.role)
        _name_tool_calls(choice, message)
    else:
        choice["text"] = completion.text
        choice["prompt_logprobs"] = prompt_rows(output)
        if style.echo:
            _prepend_prompt(choice, output, style)
    if style.token_ids:
        choice["prompt_token_ids"] = output.prompt_token_ids
        choice["token_ids"] = completion.token_ids
    return choice | beside_tokens(output, completion)


def _prepend_prompt(choice: dict[str, Any], output: RequestOutput, style: AnswerStyle) -> None:
    given = style.echo[choice["index"] // style.samples]
    text = prompt_text(given, output.prompt_token_ids, style.decode, style.token_text)
    prepend_prompt(choice, output, text, style.token_text, style.top)


def _message(output: RequestOutput, completion: Completion, style: AnswerStyle) -> Message:
    ended = completion.finish_reason is not None
    return style.reader.read(completion.text, output.prompt or "", ended)


def _call_ids(style: AnswerStyle, choice: int) -> str:
    return f"{style.request_id}/{choice}"


def _name_tool_calls(choice: dict[str, Any], message: Message) -> None:
    """An answer that ended by itself and calls tools has a finish reason of its own."""
    if message.calls and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"


def _part(
    output: RequestOutput,
    completion: Completion,
    index: int,
    tokens: int,
    first: bool,
    style: AnswerStyle,
) -> dict[str, Any]:
    choice = _common(output, completion, index, tokens, style)
    if style.token_ids:
        choice["token_ids"] = completion.token_ids[tokens:]
        if first:
            choice["prompt_token_ids"] = output.prompt_token_ids
    return choice | beside_tokens(output, completion, tokens)


def _common(
    output: RequestOutput, completion: Completion, index: int, start: int, style: AnswerStyle
) -> dict[str, Any]:
    """What a choice and a chunk share; logprobs from token ``start`` on."""
    make = chat_logprobs if style.chat else _completion_logprobs
    return {
        "index": index,
        "logprobs": make(completion, start, style) if style.logprobs else None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "epoch": output.epoch,
        "weight_versions": [
            {"version": s.version, "start": s.start, "stop": s.stop}
            for s in completion.weight_versions
        ],
        "staleness": completion.staleness,
        **({"adapter": completion.adapter} if completion.adapter else {}),
    }


def _reported(completion: Completion, style: AnswerStyle) -> list[float]:
    return completion.logprobs.processed if style.processed else completion.logprobs.raw


def _three(completion: Completion, start: int) -> dict[str, list[float | None]]:
    """The three figures RL needs, beside whichever of them OpenAI's own field shows."""
    found = completion.logprobs
    return {
        "raw_logprobs": [finite(p) for p in found.raw[start:]],
        "processed_logprobs": [finite(p) for p in found.processed[start:]],
        "log_kept_mass": [finite(p) for p in found.log_kept_mass[start:]],
    }


def _top(completion: Completion, position: int, style: AnswerStyle) -> list[tuple[int, float]]:
    """The most likely alternatives, best first, at most ``style.top`` of them."""
    if not completion.logprobs.top:
        return []
    ranked = sorted(completion.logprobs.top[position].items(), key=lambda item: -item[1])
    return ranked[: style.top]


def _completion_logprobs(completion: Completion, start: int, style: AnswerStyle) -> dict[str, Any]:
    """From token ``start`` on, where offsets are counted from."""
    ids = completion.token_ids[start:]
    texts = [style.token_text(t) for t in ids]
    values = _reported(completion, style)[start:]
    tops = []
    for position, (token, value) in enumerate(zip(ids, values, strict=True), start):
        row = {style.token_text(t): finite(p) for t, p in _top(completion, position, style)}
        row.setdefault(style.token_text(token), finite(value))
        tops.append(row)
    return {
        "tokens": texts,
        "token_logprobs": [finite(value) for value in values],
        "top_logprobs": tops,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
        **_three(completion, start),
    }


def _count_offsets_from(begin: int, found: dict[str, Any]) -> int:
    """Count those of a chunk from where the one before it ended, too; where this one ends."""
    if not found["tokens"]:
        return begin
    found["text_offset"] = [begin + at for at in found["text_offset"]]
    return int(found["text_offset"][-1]) + len(found["tokens"][-1])


def chat_logprobs(completion: Completion, start: int, style: AnswerStyle) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text = style.token_text(token)
        return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}

    content = []
    values = _reported(completion, style)
    for position in range(start, len(completion.token_ids)):
        row = entry(completion.token_ids[position], values[position])
        row["top_logprobs"] = [entry(t, p) for t, p in _top(completion, position, style)]
        content.append(row)
    return {"content": content, **_three(completion, start)}


def prompt_rows(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's rows: token id -> logprob and rank. The prompt's own token comes first, which is how
    prime-rl finds it.

    Ranks count within the row: a prompt token beyond the alternatives asked for has the last one.
    """
    found, ids = output.prompt_logprobs, output.prompt_token_ids
    if output.scores is not None:  # of a request without an answer
        found = output.scores.rows(ids)
    if found is None:
        return None
    return [None if r is None else _ranked(r, token) for token, r in zip(ids, found, strict=False)]


def _ranked(row: Mapping[int, float], first: int) -> dict[str, dict[str, float | None]]:
    order = sorted(row.items(), key=lambda item: -item[1])
    entries = {
        t: {"logprob": finite(value), "rank": rank} for rank, (t, value) in enumerate(order, 1)
    }
    return {str(t): entries[t] for t in (first, *entries)}
