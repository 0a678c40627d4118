"""Whether a call's requests can be served at all; judged in the caller's thread, as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from rollout.errors import InvalidRequest, PromptTooLong
from rollout.generation import Request


def check_requests(
    requests: Sequence[Request], *, vocab_size: int, max_model_len: int, has_tokenizer: bool
) -> None:
    """Raise ``InvalidRequest`` or ``PromptTooLong`` for the first request that cannot be served."""
    ids = [request.request_id for request in requests]
    if len(set(ids)) != len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise InvalidRequest(f"request id {twice!r} occurs twice in one call; make ids unique")
    for request in requests:
        _check_tokens(request, vocab_size)
        length = len(request.prompt_token_ids)
        if length >= max_model_len:
            raise PromptTooLong(
                f"request {request.request_id!r}: the prompt has {length} tokens, but "
                f"max_model_len is {max_model_len} and at least one token must fit after it"
            )
        if request.params.stop and not has_tokenizer:
            raise InvalidRequest(
                "stop strings need a tokenizer, and this engine has none; use stop_token_ids"
            )


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index``: the request's own for the first, a hash for the others."""
    if index == 0:
        return seed
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _check_tokens(request: Request, vocab_size: int) -> None:
    tokens, name = request.prompt_token_ids, f"request {request.request_id!r}"
    if not tokens:
        raise InvalidRequest(f"{name}: the prompt is empty; send at least one token")
    if not all(type(token) is int for token in tokens):
        raise InvalidRequest(f"{name}: prompt token ids must be integers")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{name}: token id {bad} is outside the vocabulary of {vocab_size}")
    named = [*request.params.stop_token_ids, *(request.params.logit_bias or ())]
    for token in named:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name}: token id {token} in stop_token_ids or logit_bias is outside the "
                f"vocabulary of {vocab_size}"
            )
