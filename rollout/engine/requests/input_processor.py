"""From requests to request states: admitted or refused as a call, with ids and seeds of samples."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from rollout.engine.adapters.table import AdapterTable
from rollout.engine.loaded_model import LoadedModel
from rollout.engine.requests.request_check import RequestCheck
from rollout.engine.requests.request_state import Call, RequestState, Sample
from rollout.engine.sequences.sequence import Sequence as TokenSequence
from rollout.engine.sequences.token_edits import TokenEdits
from rollout.engine.sequences.visual_positions import VisualPositions
from rollout.engine.tokenizer import Detokenizer
from rollout.errors import EngineOverloaded, InvalidRequest
from rollout.generation import Request

_SEED_BITS = 63


class InputProcessor:
    """Checks a call as a whole in its caller's thread, and builds its states in the engine's.

    ``live_ids``: the request ids from ``take`` until their last output. ``num_waiting()`` counts
    the sequences that the scheduler keeps waiting, ``max_queued`` is the most there may be, and
    ``max_per_call`` the most of one call.
    ``seed`` draws the seeds of requests that bring none.
    """

    def __init__(
        self,
        model: LoadedModel,
        max_model_len: int,
        *,
        seed: int,
        max_queued: int,
        max_per_call: int,
        num_waiting: Callable[[], int],
        adapters: AdapterTable,
    ) -> None:
        self.live_ids: set[str] = set()
        self._model, self._tokenizer, self._adapters = model, model.tokenizer, adapters
        self._check = RequestCheck(model, max_model_len)
        self._max_model_len = max_model_len
        self._max_queued, self._num_waiting = max_queued, num_waiting
        self._max_per_call = max_per_call
        self._coming = 0  # sequences taken that the scheduler has not got yet
        self._seeds = random.Random(seed)
        self._next_seq_id = 0
        self._lock = threading.Lock()

    def take(self, requests: Sequence[Request]) -> list[str]:
        """Check everything and occupy the request ids.

        Raises ``InvalidRequest`` or ``PromptTooLong`` for the first request that cannot be served,
        ``EngineOverloaded`` while too many sequences wait; then nothing is occupied. Where none
        waits a call of any size up to ``max_per_call`` is taken: it is one message, and would
        never get in otherwise.
        """
        count = sum(request.params.n for request in requests)
        if count > self._max_per_call:
            raise InvalidRequest(
                f"this call brings {count} sequences (prompts: {len(requests)}, n for each), and "
                f"max_seqs_per_call is {self._max_per_call}: split it into several calls, or start "
                "the engine with a larger --max-seqs-per-call"
            )
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise InvalidRequest(f"request id {twice!r} occurs twice in one call; make ids unique")
        for request in requests:
            self._check.check(request)
            if request.params.adapter is not None:
                self._adapters.resolve(request.params.adapter)
        with self._lock:
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

    def with_bad_words(self, requests: Sequence[Request]) -> list[Request]:
        """``requests`` with the token ids of their bad words, made once for each params.

        For any thread; of very many words it takes a second, so not for an event loop.
        """
        made: dict[int, tuple[tuple[int, ...], ...]] = {}
        for params in (r.params for r in requests if r.bad_words is None):
            if id(params) not in made and self._tokenizer is not None:
                words = (self._ids_of_word(word) for word in params.bad_words)
                made[id(params)] = tuple(dict.fromkeys(ids for word in words for ids in word))
        return [
            replace(r, bad_words=made[id(r.params)])
            if r.params.bad_words and id(r.params) in made and r.bad_words is None
            else r
            for r in requests
        ]

    @contextmanager
    def handing_over(self, requests: Sequence[Request]) -> Iterator[None]:
        """Within it the sequences that ``take`` counted go to the scheduler, or are refused.

        A call that is checked meanwhile counts each of them once.
        """
        with self._lock:
            try:
                yield
            finally:
                self._coming -= sum(request.params.n for request in requests)

    def build(self, requests: Sequence[Request], call: Call, arrived: float) -> list[RequestState]:
        """States with their samples, numbered in order. Engine thread only."""
        edits: dict[int, TokenEdits | None] = {}  # made once for each params
        return [
            RequestState(request, self._samples(request, call.stream, edits), call, arrived)
            for request in requests
        ]

    def _samples(
        self, request: Request, stream: bool, edits: dict[int, TokenEdits | None]
    ) -> list[Sample]:
        """They have what does not change in common, the prompt's tokens included: there may be
        many, and none has run yet.
        """
        params, prompt, target = request.params, request.prompt_token_ids, None
        alone = params.max_tokens == 0 and not (params.hidden_state or request.visuals)
        if alone and len(prompt) > 1:
            target = prompt[-1]
            prompt = prompt[:-1]  # nothing is wanted of where its last token is
        if params.classifies and params.pools_last:
            prompt = self._unpadded(prompt)
        longest = self._max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt) + params.max_tokens)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos or params.structured_outputs is not None:
            stops |= self._model.eos_ids  # a grammar leaves one where the text is complete
        if id(params) not in edits:
            edits[id(params)] = TokenEdits.of(params, stops)
        make = partial(
            TokenSequence,
            request_id=request.request_id,
            params=params,
            prompt_token_ids=list(prompt),
            shares_prompt=params.n > 1,
            target=target,
            max_len=longest,
            stop_ids=stops,
            bad_words=request.bad_words or (),
            token_edits=edits[id(params)],
            visual_positions=VisualPositions(len(prompt), request.visuals)
            if request.visuals
            else None,
            adapter=None if params.adapter is None else self._adapters.resolve(params.adapter),
        )
        stepwise = (stream and params.stream_interval == 1) or bool(params.stop)
        samples = []
        for index in range(params.n):
            seq = make(seq_id=self._next_seq_id, index=index, seed=self._seed(params.seed, index))
            self._next_seq_id += 1
            text = None
            if self._tokenizer is not None and params.detokenize:
                text = Detokenizer(self._tokenizer, prompt, params)
            samples.append(Sample(seq, text, stepwise))
            if request.delivered:
                samples[-1].go_on(request.delivered[index])
        return samples

    def _seed(self, given: int | None, index: int) -> int:
        return self._seeds.getrandbits(_SEED_BITS) if given is None else sample_seed(given, index)

    def _unpadded(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Without the padding at its end, as transformers looks for the last token; one is left."""
        stop = len(prompt)
        while stop > 1 and prompt[stop - 1] == self._model.config.pad_token_id:
            stop -= 1
        return prompt[:stop]

    def _ids_of_word(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of a text, within one and after a space."""
        assert self._tokenizer is not None
        texts = sorted({word, " " + word.lstrip()})
        made = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return [tuple(ids) for ids in made if ids]


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index``: the request's own for the first, a hash for the others."""
    if index == 0:
        return seed
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
