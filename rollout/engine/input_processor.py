"""From requests to request states: what can be served at all, and the ids and seeds of samples."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise

from rollout.engine.adapter_table import AdapterTable
from rollout.engine.images.positions import ImagePositions
from rollout.engine.request_state import Call, RequestState, Sample
from rollout.engine.sequence import Sequence as TokenSequence
from rollout.engine.tokenizer import Detokenizer, Tokenizer
from rollout.errors import EngineOverloaded, InvalidRequest, PromptTooLong
from rollout.generation import TOKEN_PARAMS, Request, SamplingParams
from rollout.generation.packed import experts_of

_SEED_BITS = 63


class InputProcessor:
    """Judges a call as a whole in its caller's thread, and builds its states in the engine's.

    ``live_ids`` are the request ids between the two and until the last output. ``num_waiting()``
    counts the sequences that the scheduler keeps waiting, ``max_queued`` is the most there may be.
    ``hidden_states``: whether the model gives them. ``image_token``: what stands for images in a
    prompt of a model that sees them. ``experts``: of a mixture, its layers that have some,
    how many a token has of them, and how many there are. ``classifier``: the architecture of one
    with a score head in the place of the language model's, ``padding`` the token that it pads with.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        seed: int,
        max_queued: int,
        num_waiting: Callable[[], int],
        hidden_states: bool,
        adapters: AdapterTable,
        image_token: int | None = None,
        experts: tuple[int, int, int] | None = None,
        classifier: str = "",
        padding: int | None = None,
    ) -> None:
        self.live_ids: set[str] = set()
        self._max_queued, self._num_waiting = max_queued, num_waiting
        self._hidden_states, self._image_token = hidden_states, image_token
        self._adapters = adapters
        self._experts, self._classifier, self._padding = experts, classifier, padding
        self._coming = 0  # sequences taken that the scheduler has not got yet
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._next_seq_id = 0
        self._taking = threading.Lock()

    def take(self, requests: Sequence[Request]) -> list[str]:
        """Check everything and occupy the request ids.

        Raises ``InvalidRequest`` or ``PromptTooLong`` for the first request that cannot be served,
        ``EngineOverloaded`` while too many sequences wait; then nothing is occupied. Where none
        waits a call of any size is taken: it is one message, and would never get in otherwise.
        """
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise InvalidRequest(f"request id {twice!r} occurs twice in one call; make ids unique")
        for request in requests:
            self._check_task(request)
            self._check_length(request)  # first, and without a look at the tokens
            self._check_tokens(request)
            self._check_images(request)
            self._check_alternatives(request)
            self._check_texts(request.params)
            self._check_delivered(request)
            if request.params.adapter is not None:
                self._adapters.resolve(request.params.adapter)
            self._check_experts(request)
        count = sum(request.params.n for request in requests)
        with self._taking:
            waiting = self._coming + self._num_waiting()
            if waiting and waiting + count > self._max_queued:
                raise EngineOverloaded(
                    f"{waiting} sequences wait already, and this call brings {count}: "
                    f"max_queued_requests is {self._max_queued}; try again later"
                )
            if taken := self.live_ids.intersection(ids):
                raise InvalidRequest(f"request id {min(taken)!r} is still running; use another")
            self.live_ids.update(ids)
            self._coming += count
        return ids

    def spelt(self, requests: Sequence[Request]) -> list[Request]:
        """With the token ids of their bad words, made once for each params; for any thread.

        It takes a second for a call of very many words: not for an event loop.
        """
        made: dict[int, tuple[tuple[int, ...], ...]] = {}
        for params in (r.params for r in requests if r.bad_words is None):
            if id(params) not in made and self._tokenizer is not None:
                words = (self._spellings(word) for word in params.bad_words)
                made[id(params)] = tuple(dict.fromkeys(ids for word in words for ids in word))
        return [
            replace(r, bad_words=made[id(r.params)])
            if r.params.bad_words and id(r.params) in made and r.bad_words is None
            else r
            for r in requests
        ]

    @contextmanager
    def handing_over(self, requests: Sequence[Request]) -> Iterator[None]:
        """What ``take`` took goes to the scheduler within, or is refused after all.

        No call that is judged meanwhile counts it twice, or not at all.
        """
        with self._taking:
            try:
                yield
            finally:
                self._coming -= sum(request.params.n for request in requests)

    def build(self, requests: Sequence[Request], call: Call, arrived: float) -> list[RequestState]:
        """States with their samples, numbered in order. Engine thread only."""
        return [
            RequestState(
                request,
                [self._sample(request, i, call.stream) for i in range(request.params.n)],
                call,
                arrived,
            )
            for request in requests
        ]

    def _sample(self, request: Request, index: int, stream: bool) -> Sample:
        params, prompt, target = request.params, request.prompt_token_ids, None
        adapter = params.adapter
        alone = params.max_tokens == 0 and not (params.hidden_state or request.images)
        if alone and len(prompt) > 1:
            target = prompt[-1]
            prompt = prompt[:-1]  # nothing is wanted of where its last token is
        if params.classifies and params.pools_last:
            prompt = self._unpadded(prompt)
        longest = self._max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt) + params.max_tokens)
        stops = frozenset(params.stop_token_ids)
        if params.seed is None:
            seed = self._seeds.getrandbits(_SEED_BITS)
        else:
            seed = sample_seed(params.seed, index)
        seq = TokenSequence(
            seq_id=self._next_seq_id,
            request_id=request.request_id,
            index=index,
            params=params,
            seed=seed,
            prompt_token_ids=prompt,
            target=target,
            max_len=longest,
            stop_ids=stops if params.ignore_eos else stops | self._eos_ids,
            bad_words=request.bad_words or (),
            image_positions=(
                ImagePositions(len(prompt), request.images) if request.images else None
            ),
            adapter=None if adapter is None else self._adapters.resolve(adapter),
        )
        self._next_seq_id += 1
        text = None
        if self._tokenizer is not None and params.detokenize:
            text = Detokenizer(self._tokenizer, prompt, params)
        sample = Sample(seq, text, stepwise=stream or bool(params.stop))
        if request.delivered:
            sample.go_on(request.delivered[index])
        return sample

    def _unpadded(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Without the padding at its end, as transformers looks for the last token; one is left."""
        stop = len(prompt)
        while stop > 1 and prompt[stop - 1] == self._padding:
            stop -= 1
        return prompt[:stop]

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of a text, within one and after a space."""
        assert self._tokenizer is not None
        texts = sorted({word, " " + word.lstrip()})
        made = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return [tuple(ids) for ids in made if ids]

    def _check_texts(self, params: SamplingParams) -> None:
        if self._tokenizer is not None:
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
        if params.structured_outputs or params.prompt_logprobs is not None or params.hidden_state:
            raise InvalidRequest(
                f"{name}: grammars, prompt logprobs and hidden states are not continued: send the "
                "prompt again"
            )
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
        if self._experts is None:
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
        layers, chosen, count = self._experts
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

    def _check_task(self, request: Request) -> None:
        params, name = request.params, f"request {request.request_id!r}"
        if params.classifies and not self._classifier:
            raise InvalidRequest(
                f"{name}: this model has no score head: to classify, or to have a reward, serve a "
                "checkpoint whose architecture ends in ForSequenceClassification"
            )
        answers = params.max_tokens != 0 or params.prompt_logprobs is not None
        if self._classifier and (answers or not params.classifies):
            raise InvalidRequest(
                f"{name}: {self._classifier} has a score head and no LM head: ask it by classify "
                "(POST /classify); to generate, score tokens or embed serve a checkpoint whose "
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

    def _check_images(self, request: Request) -> None:
        if self._image_token is None:
            return
        places = request.prompt_token_ids.count(self._image_token)
        if places != sum(placed.image.count for placed in request.images):
            raise InvalidRequest(
                f"request {request.request_id!r}: the prompt has placeholders of images (token "
                f"{self._image_token}) without images: send them with it"
            )

    def _check_alternatives(self, request: Request) -> None:
        params, length = request.params, len(request.prompt_token_ids)
        if params.prompt_logprobs is not None and params.prompt_logprobs_start > length:
            raise InvalidRequest(
                f"request {request.request_id!r}: prompt_logprobs_start is "
                f"{params.prompt_logprobs_start}, but the prompt has {length} tokens"
            )
        if request.params.hidden_state and not self._hidden_states:
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


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index``: the request's own for the first, a hash for the others."""
    if index == 0:
        return seed
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
