"""Prompts, conversations, parameters and ids of one call, in the forms that callers write them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from rollout.api.visual_inputs import visual_prompt
from rollout.config import check_written
from rollout.errors import ConfigError, InvalidRequest, PromptTooLong
from rollout.generation import AnyPrompt, ContinuedPrompt, SamplingParams, VisualPrompt, parts_of
from rollout.rpc.convert import Messages

Prompts = AnyPrompt | Mapping[str, Any] | Sequence[AnyPrompt | Mapping[str, Any]]
OneParams = SamplingParams | Mapping[str, Any]  # a mapping: SamplingParams.from_dict
Params = OneParams | Sequence[OneParams] | None


def as_prompts(prompts: Any, max_model_len: int, params: Params = None) -> list[AnyPrompt]:
    """One prompt per entry; a list of ids that is too long is refused before its ids are read.

    Where all ``params`` are of prompts without an answer, no room for one is asked for.
    """
    each = params if isinstance(params, Sequence) and params else [params]
    answerless = all(isinstance(p, SamplingParams) and p.max_tokens == 0 for p in each)
    return _as_prompts(prompts, max_model_len, answerless=answerless)


def _as_prompts(prompts: Any, max_model_len: int, *, answerless: bool) -> list[AnyPrompt]:
    if isinstance(prompts, str | Mapping | VisualPrompt | ContinuedPrompt):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequest(
            f"prompts must be a text, a list of token ids, or a list of either, not "
            f"{type(prompts).__name__}{_as_list(prompts)}"
        )
    each = [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)
    for number, prompt in enumerate(each):
        if isinstance(prompt, Mapping):
            prompt = each[number] = visual_prompt(prompt, f"prompt {number}")
        prompt, _, _ = parts_of(prompt)
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
        if listed and len(prompt) >= max_model_len + answerless:
            room = "" if answerless else " and one token at least must fit after it"
            raise PromptTooLong(
                f"prompt {number} has {len(prompt)} tokens, but max_model_len is {max_model_len}"
                f"{room}"
            )
        ids = listed and set(map(type, prompt)) <= {int}
        if not isinstance(prompt, str) and not ids:
            several = "; it is a list of texts, where one text goes"
            texts = listed and set(map(type, prompt)) == {str}
            hint = several if texts else _as_list(prompt) or _as_list(prompt[0] if listed else None)
            raise InvalidRequest(f"prompt {number} is neither a text nor a list of token ids{hint}")
    return each


def have_files(prompts: Any) -> bool:
    """Whether a prompt is a mapping, whose images and videos are to be read: not in a loop."""
    if isinstance(prompts, list | tuple) and prompts and not isinstance(prompts[0], int):
        return any(isinstance(prompt, Mapping) for prompt in prompts)
    return isinstance(prompts, Mapping)


def as_one_prompt(prompt: Any) -> str | list[int]:
    """A text, or a list of token ids, which may be empty."""
    if isinstance(prompt, str):
        return prompt
    prompt = list(prompt) if isinstance(prompt, Iterator) else prompt
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not listed or set(map(type, prompt)) - {int}:
        hint = _as_list(prompt) or _as_list(prompt[0] if listed else None)
        raise InvalidRequest(f"the prompt is neither a text nor a list of token ids{hint}")
    return list(prompt)


def _as_list(value: Any) -> str:
    """A remedy for tensors and arrays of ids, and for numbers out of one."""
    if not callable(getattr(value, "tolist", None)):
        return ""
    if getattr(value, "ndim", 1) == 0:
        return ": ids are numbers of an array; send [int(token) for token in ids]"
    return ": send its tolist()"


def check_scored(prompts: Any) -> None:
    """``InvalidRequest`` for what is no list of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise InvalidRequest(
            "prompts must be a list of texts or of lists of token ids, got "
            f"{type(prompts).__name__}: wrap one text as [text], use .tolist() on an array"
        )


def check_vectors(normalize: Any, dimensions: Any) -> None:
    """``InvalidRequest`` for what embeddings cannot be made like."""
    as_flag(normalize, "normalize")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise InvalidRequest(f"dimensions must be 1 or more, got {dimensions!r:.80}")


def as_completions(completions: Any) -> list[list[int]] | None:
    """One list of token ids per entry."""
    if completions is None:
        return None
    if isinstance(completions, str) or not isinstance(completions, Sequence):
        raise InvalidRequest("completions must be a list of lists of token ids, or None")
    for number, ids in enumerate(completions):
        if isinstance(ids, str) or not isinstance(ids, Sequence) or set(map(type, ids)) - {int}:
            raise InvalidRequest(f"completion {number} is not a list of token ids (see tokenize)")
    return [list(ids) for ids in completions]


def as_experts(routed_experts: Any, count: int) -> list[Any]:
    """One array, or None, for each of ``count`` sequences."""
    if routed_experts is None:
        return [None] * count
    if not isinstance(routed_experts, list | tuple) or len(routed_experts) != count:
        found = f"{len(routed_experts)}" if isinstance(routed_experts, list | tuple) else "no list"
        raise InvalidRequest(
            f"routed_experts must be a list of {count} arrays, one for each prompt, got {found}"
        )
    return list(routed_experts)


def are_conversations(prompts: Any) -> bool:
    """Whether these are the messages of a conversation, or of several, instead of prompts."""
    first = prompts
    while isinstance(first, Sequence) and not isinstance(first, str) and first:
        first = first[0]
    return isinstance(first, Mapping) and "role" in first


def as_conversations(messages: Any) -> list[Messages]:
    """One conversation per entry."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest('messages must be a list of {"role", "content"}, or a list of those')
    several = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
    return [as_conversation(one) for one in several]


def as_conversation(messages: Any) -> Messages:
    """The messages of one conversation; ``InvalidRequest`` names the one that is none."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f'a conversation is a list of {{"role", "content"}}, got {messages!r:.80}'
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f'message {number} must be a {{"role": ..., "content": ...}}, got {message!r:.80}'
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str | list | tuple | Mapping):
            raise InvalidRequest(
                f"the content of message {number} must be a text or a list of parts, got "
                f"{content!r:.80}"
            )
    return messages


def one_of(params: Any, sampling_params: Any) -> Any:
    """``sampling_params`` is vLLM's name of ``params``; ``InvalidRequest`` where both are given."""
    if params is not None and sampling_params is not None:
        raise InvalidRequest("params and sampling_params are the same: give one of them")
    return params if sampling_params is None else sampling_params


def as_texts(given: Any, what: str) -> list[str] | None:
    """A list of texts, of one where it is a single text; None stays."""
    if given is None or _is_text(given):
        return None if given is None else [given]
    if not isinstance(given, Sequence | Set) or not all(map(_is_text, given)):
        raise InvalidRequest(f"{what} must be a text, a list of texts or None, got {given!r:.80}")
    return list(given)


def _is_text(given: Any) -> bool:
    """A text that can be sent: none with half a surrogate pair in it."""
    try:
        return isinstance(given, str) and given.encode() is not None
    except UnicodeEncodeError:
        return False


def as_flag(given: Any, what: str) -> bool:
    """True or False alone, numpy's too: a text such as "false" would count as True."""
    if not isinstance(given, bool | np.bool_):
        raise InvalidRequest(f"{what} must be True or False, got {given!r:.80}")
    return bool(given)


def as_path(given: Any, what: str) -> str:
    """A path as a text; an empty one would be the working directory."""
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str):
        raise ConfigError(f"{what} must be a path, got {given!r:.80}")
    check_written(what, path)
    return path


def as_params(params: Params, count: int) -> list[SamplingParams]:
    """One for each of ``count`` prompts."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [SamplingParams.of(params)] * count
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise InvalidRequest(f"params must be SamplingParams or a list, not {params!r}")
    many = [SamplingParams.of(p) for p in params]
    if len(many) != count:
        raise InvalidRequest(f"{len(many)} sampling parameters for {count} prompts: give 1 or each")
    return many


def as_ids(request_ids: str | Sequence[str] | None, count: int) -> list[str]:
    """One for each of ``count`` prompts, made where none is given, or one for them all: of several
    prompts they end in the prompt's index, by which errors name it.
    """
    if request_ids is None or isinstance(request_ids, str):
        call = request_ids or uuid.uuid4().hex
        request_ids = [call] if count == 1 else [f"{call}-{index}" for index in range(count)]
    if not isinstance(request_ids, Sequence):
        raise InvalidRequest(f"request_ids must be a list of texts, got {request_ids!r:.80}")
    if len(request_ids) != count:
        raise InvalidRequest(f"{len(request_ids)} request ids for {count} prompts")
    named = [given for given in request_ids if given is not None]
    if not all(_is_text(given) and len(given) <= 1024 for given in named):
        raise InvalidRequest("request ids must be texts of at most 1024 characters, in UTF-8")
    return [request_id or uuid.uuid4().hex for request_id in request_ids]
