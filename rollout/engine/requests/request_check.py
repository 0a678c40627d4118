"""Whether one request can be served by this model at all, judged before it is admitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rollout.engine.loaded_model import LoadedModel
from rollout.errors import InvalidRequest, PromptTooLong
from rollout.generation import TOKEN_PARAMS, Request, SamplingParams
from rollout.generation.packed import experts_of


class RequestCheck:
    """``check`` raises ``InvalidRequest`` or ``PromptTooLong`` naming what is wrong; any thread."""

    def __init__(self, model: LoadedModel, max_model_len: int) -> None:
        self._model, self._max_model_len = model, max_model_len
        self._vocab_size = model.config.vocab_size

    def check(self, request: Request) -> None:
        self._check_task(request)
        self._check_length(request)  # first, and without a look at the tokens
        self._check_tokens(request)
        self._check_visuals(request)
        self._check_drawable(request)
        self._check_alternatives(request)
        self._check_texts(request.params)
        self._check_delivered(request)
        self._check_experts(request)

    def _check_task(self, request: Request) -> None:
        params, name = request.params, f"request {request.request_id!r}"
        architecture, classifies = self._model.config.architecture, bool(self._model.config.labels)
        if params.classifies and not classifies:
            raise InvalidRequest(
                f"{name}: this model has no score head: to classify, or to have a reward, serve a "
                "checkpoint whose architecture ends in ForSequenceClassification"
            )
        answers = params.max_tokens != 0 or params.prompt_logprobs is not None
        if classifies and (answers or not params.classifies):
            raise InvalidRequest(
                f"{name}: {architecture} has a score head and no LM head: ask it by classify (POST "
                "/classify); to generate, score tokens or embed serve a checkpoint whose "
                "architecture ends in ForCausalLM"
            )

    def _check_length(self, request: Request) -> None:
        length, answerless = len(request.prompt_token_ids), request.params.max_tokens == 0
        if length > self._max_model_len and answerless:
            raise PromptTooLong(
                f"request {request.request_id!r}: the sequence has {length} tokens, but "
                f"max_model_len is {self._max_model_len}"
            )
        if length >= self._max_model_len and not answerless:
            raise PromptTooLong(
                f"request {request.request_id!r}: the prompt has {length} tokens, but "
                f"max_model_len is {self._max_model_len} and one token at least must fit after it"
            )

    def _check_tokens(self, request: Request) -> None:
        tokens, name = request.prompt_token_ids, f"request {request.request_id!r}"
        if not tokens:
            raise InvalidRequest(f"{name}: the prompt is empty; send at least one token")
        if set(map(type, tokens)) != {int}:
            raise InvalidRequest(f"{name}: prompt token ids must be integers")
        params = request.params
        for where, ids in (
            ("the prompt", (min(tokens), max(tokens))),
            *((name, getattr(params, name) or ()) for name in TOKEN_PARAMS),
        ):
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token} in {where} is outside the vocabulary of "
                        f"{self._vocab_size}"
                    )

    def _check_drawable(self, request: Request) -> None:
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._model.eos_ids)}
        if (
            params.min_tokens
            and params.allowed_token_ids
            and ends.issuperset(params.allowed_token_ids)
        ):
            raise InvalidRequest(
                f"request {request.request_id!r}: all of allowed_token_ids end an answer, which "
                f"may not end before min_tokens={params.min_tokens}: nothing could be drawn"
            )

    def _check_visuals(self, request: Request) -> None:
        ids = request.prompt_token_ids
        for what, token in self._model.placeholders.items():
            shown = (each for each in request.visuals if ids[each.start] == token)
            if ids.count(token) != sum(each.visual.count for each in shown):
                raise InvalidRequest(
                    f"request {request.request_id!r}: the prompt has placeholders of {what} (token "
                    f"{token}) without {what}: send them with it"
                )

    def _check_alternatives(self, request: Request) -> None:
        params, length = request.params, len(request.prompt_token_ids)
        if params.prompt_logprobs is not None and params.prompt_logprobs_start > length:
            raise InvalidRequest(
                f"request {request.request_id!r}: prompt_logprobs_start is "
                f"{params.prompt_logprobs_start}, but the prompt has {length} tokens"
            )
        if request.params.hidden_state and not self._model.gives_hidden_states:
            raise InvalidRequest(
                f"request {request.request_id!r}: this model gives no hidden states: it has a "
                "forward pass of its own"
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(request.params, name)
            if count is not None and count > self._vocab_size:
                raise InvalidRequest(
                    f"request {request.request_id!r}: {name} must be at most the vocabulary's "
                    f"{self._vocab_size}, got {count} (by top_logprobs, where that was given)"
                )

    def _check_texts(self, params: SamplingParams) -> None:
        if self._model.tokenizer is not None:
            return
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                raise InvalidRequest(
                    f"{name} needs a tokenizer, and this engine has none: use stop_token_ids, "
                    "allowed_token_ids or logit_bias"
                )

    def _check_delivered(self, request: Request) -> None:
        """What another engine has delivered is what this one could have, up to there."""
        given, params, name = request.delivered, request.params, f"request {request.request_id!r}"
        if not given:
            return
        if [one.index for one in given] != list(range(params.n)):
            raise InvalidRequest(f"{name}: {params.n} samples, in their order, are to be continued")
        longest = self._max_model_len - len(request.prompt_token_ids)
        longest = min(longest, params.max_tokens or longest)
        for one in given:
            count, logs = len(one.token_ids), one.logprobs
            columns: list[Sequence[object]] = [logs.raw, logs.processed, logs.log_kept_mass]
            columns += [] if params.logprobs is None else [logs.top or []]
            mask = one.sampling_mask
            columns += [mask.rows() if mask else []] if params.return_sampling_mask else []
            spans = one.weight_versions
            if (
                any(len(column) != count for column in columns)
                or any(not 0 <= token < self._vocab_size for token in one.token_ids)
                or any(a.stop != b.start for a, b in pairwise(spans))
                or (count and (not spans or (spans[0].start, spans[-1].stop) != (0, count)))
                or (one.finish_reason is None and count >= longest)
            ):
                raise InvalidRequest(f"{name}: sample {one.index} is none that can be continued")
        if all(one.finish_reason is not None for one in given):
            raise InvalidRequest(f"{name}: all its samples have finished")

    def _check_experts(self, request: Request) -> None:
        params, name = request.params, f"request {request.request_id!r}"
        told = params.routed_experts
        if told is None and not params.return_routed_experts:
            return
        if self._model.experts is None:
            raise InvalidRequest(
                f"{name}: this model has no experts that could be told (it is dense, or its layers "
                "are not this package's): leave out return_routed_experts and routed_experts"
            )
        length = len(request.prompt_token_ids)
        if params.routed_experts_prompt_start >= length:
            raise InvalidRequest(
                f"{name}: routed_experts_prompt_start {params.routed_experts_prompt_start} must be "
                f"below the prompt's {length} tokens"
            )
        if told is None:
            return
        layers, chosen, count = self._model.experts
        array = experts_of(told)
        if array.shape[1:] != (layers, chosen) or array.shape[0] not in (length - 1, length):
            raise InvalidRequest(
                f"{name}: routed_experts have shape {list(array.shape)}; this model and prompt "
                f"need [{length - 1} or {length}, {layers}, {chosen}]"
            )
        if array.size and int(array.max()) >= count:
            raise InvalidRequest(
                f"{name}: routed_experts name expert {int(array.max())}, but there are {count}"
            )
