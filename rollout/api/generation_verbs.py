"""The verbs that run requests, awaitable: ``generate``, ``chat``, ``score`` and what is near."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from rollout.api.arguments import (
    OneParams,
    Params,
    Prompts,
    are_conversations,
    as_completions,
    as_conversation,
    as_conversations,
    as_experts,
    as_ids,
    as_params,
    as_prompts,
    as_texts,
    check_scored,
    check_vectors,
    have_files,
    one_of,
)
from rollout.api.backend import Backend, Outputs
from rollout.api.call_names import CallNames
from rollout.api.read_floor import ReadFloor
from rollout.api.sessions.session import AsyncSession
from rollout.api.visual_inputs import has_visuals, portable, with_images
from rollout.errors import InvalidRequest
from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    ClassificationOutput,
    Completion,
    ContinuedPrompt,
    EmbeddingOutput,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    VisualPrompt,
    classify_params,
    embed_params,
    score_params,
    scored_rows,
)
from rollout.rpc.convert import Messages
from rollout.wire.spellings import VERBS, explains_arguments


@explains_arguments(VERBS, InvalidRequest)
class GenerationVerbs(ABC):
    """Over one backend, whose first use starts it."""

    backend: Backend
    names: CallNames  # of the calls under way

    async def start(self) -> None:
        """Load the model (or check that the service answers). Idempotent."""
        await self.backend.start()

    @abstractmethod
    def read_floor(self) -> ReadFloor:
        """The weights that requests run on which ask for none: these, or newer ones."""

    async def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        sampling_params: Params = None,
        images: Sequence[Any] | None = None,
        request_ids: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of ``prompts``.

        ``prompts``: a text, a list of token ids, or a list of either. ``params``: one for all, or
        one each; a dict is read as ``SamplingParams`` (``sampling_params`` is another name of it,
        vLLM's). ``images``: those of a single prompt, or a list for each prompt; see
        ``docs/vision.md``. A call is admitted as a whole, or not at all. Raises a
        ``RequestError`` or ``EngineError``.
        """
        params = one_of(params, sampling_params)
        if images is not None:
            prompts = await asyncio.to_thread(with_images, prompts, images)
        outputs = self.stream_many(prompts, params, request_ids=request_ids, stream=False)
        return await in_order(outputs)

    async def chat(
        self,
        /,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        sampling_params: Params = None,
        request_ids: str | Sequence[str] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue one conversation or several, rendered by the model's chat template.

        ``options``: the fields of ``ChatOptions``, such as ``tools`` and ``chat_template_kwargs``.
        ``params`` as for ``generate``.
        """
        params = one_of(params, sampling_params)
        outputs = self.stream_chat(
            messages, params, request_ids=request_ids, stream=False, **options
        )
        return await in_order(outputs)

    async def embed(
        self,
        prompts: Prompts,
        *,
        normalize: bool = True,
        pooling: str = "last",
        dimensions: int | None = None,
        adapter: str | None = None,
        request_ids: str | Sequence[str] | None = None,
    ) -> list[EmbeddingOutput]:
        """One embedding per prompt: the last token's hidden state after the model's final norm.

        ``pooling="mean"`` takes the mean over all tokens instead. ``dimensions`` keeps that many
        leading numbers. The vector has length 1 unless ``normalize`` is False. ``adapter``: which
        adapter the model runs with. Prompts are given as for ``generate`` and run in the same
        steps. ``RequestAborted`` if one was aborted, ``EngineError`` if the weights give NaN.
        """
        check_vectors(normalize, dimensions)
        params = replace(embed_params(pooling), adapter=adapter)
        outputs = await self.generate(prompts, params, request_ids=request_ids)
        return [
            EmbeddingOutput.of(output, normalize=normalize, dimensions=dimensions)
            for output in outputs
        ]

    async def classify(
        self,
        /,
        prompts: Prompts | Messages | Sequence[Messages],
        *,
        pooling: str = "last",
        adapter: str | None = None,
        request_ids: str | Sequence[str] | None = None,
        **options: Any,
    ) -> list[ClassificationOutput]:
        """The score head's logits for each prompt, with probabilities, label and reward.

        For models whose architecture ends in ForSequenceClassification, such as reward models. The
        logits are the last token's; ``pooling="all"`` gives every token's. Prompts are given as
        for ``generate``, or as conversations as for ``chat`` with its ``options``; these end with
        their last message unless ``add_generation_prompt``. ``adapter``: which adapter the model
        runs with. ``InvalidRequest`` if the model has no such head, ``RequestAborted`` if a prompt
        was aborted, ``EngineError`` if the weights give NaN.
        """
        params, given = replace(classify_params(pooling), adapter=adapter), cast(Any, prompts)
        if are_conversations(prompts):
            options = {"add_generation_prompt": False, **options}
            outputs = await self.chat(given, params, request_ids=request_ids, **options)
        elif options:
            raise InvalidRequest(
                f"{next(iter(options))} is no option of texts and token ids: those are pooling, "
                "adapter and request_ids; what chat takes goes with conversations (outputs have "
                "logits and probs both)"
            )
        else:
            outputs = await self.generate(given, params, request_ids=request_ids)
        return [ClassificationOutput.of(output, pooling) for output in outputs]

    async def score(
        self,
        prompts: Sequence[str | Sequence[int]],
        completions: Sequence[Sequence[int]] | None = None,
        *,
        top_logprobs: int = 0,
        last_n: int | None = None,
        temperature: float = 1.0,
        adapter: str | None = None,
        routed_experts: Sequence[Any] | None = None,
        request_ids: str | Sequence[str] | None = None,
    ) -> list[ScoreOutput]:
        """Logprobs of given tokens: each prompt's completion, or without ``completions`` all tokens
        of the prompts but the first.

        ``last_n`` scores only that many of the last of them. ``top_logprobs`` adds the most likely
        tokens at each position. ``temperature``: of the distribution, in [1e-5, 1e9].
        ``adapter``: which adapter the model runs with. ``routed_experts``: of a mixture, an array
        for each prompt, the experts that its sequence's tokens are sent to, as
        ``Completion.routed_experts`` has them (None: its routers choose). Prompts are texts or
        lists of ids, and run in the same steps as generation. Tokens before the first scored one
        may come from the prefix cache, and need no logits. ``InvalidRequest`` names a row with
        nothing to score; ``RequestAborted`` if a row was aborted, ``EngineError`` if the weights
        give NaN.
        """
        await self.start()
        check_scored(prompts)
        each = as_prompts(prompts, self.backend.max_model_len, score_params(0, 0, 1.0))
        rows, starts = scored_rows(await self._ids_of(each), as_completions(completions), last_n)
        params = [
            replace(
                score_params(top_logprobs, start, temperature),
                adapter=adapter,
                routed_experts=experts,
            )
            for start, experts in zip(starts, as_experts(routed_experts, len(rows)), strict=True)
        ]
        outputs = await self.generate(rows, params, request_ids=request_ids)
        return [ScoreOutput.of(output) for output in outputs]

    async def _ids_of(self, prompts: Sequence[AnyPrompt]) -> list[list[int]]:
        found: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                found.append(await self.backend.tokenize(prompt))
            elif isinstance(prompt, VisualPrompt | ContinuedPrompt):
                raise InvalidRequest("score takes texts and lists of token ids alone")
            else:
                found.append(list(prompt))
        return found

    async def stream(
        self, prompt: AnyPrompt | Mapping[str, Any], params: OneParams | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Cumulative outputs of one prompt as they grow; leaving the loop aborts the request."""
        outputs = self.stream_many([prompt], params)
        async with aclosing(outputs):
            async for _, output in outputs:
                yield output

    async def stream_many(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        request_ids: str | Sequence[str] | None = None,
        stream: bool = True,
    ) -> Outputs:
        """(index of the prompt, output) as they finish; with ``stream`` cumulative ones, too."""
        await self.start()
        longest = self.backend.max_model_len
        if have_files(prompts):
            each = await asyncio.to_thread(as_prompts, prompts, longest, params)
        else:
            each = as_prompts(prompts, longest, params)
        ids, many = as_ids(request_ids, len(each)), self._params(params, len(each))
        with self.names.under_way(request_ids, ids):
            outputs = self.backend.generate(each, many, ids, stream=stream)
            async with aclosing(outputs):
                async for item in outputs:
                    yield item

    async def stream_chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        request_ids: str | Sequence[str] | None = None,
        stream: bool = True,
        delivered: Sequence[tuple[Completion, ...]] | None = None,
        **options: Any,
    ) -> Outputs:
        """As ``stream_many``, for conversations; ``options`` as for ``chat``. ``delivered``: what
        another engine has answered of each, as a ``ContinuedPrompt``'s.
        """
        chat = ChatOptions.from_dict(options)
        await self.start()
        each = as_conversations(messages)
        if any(has_visuals(one) for one in each):
            each = await asyncio.to_thread(lambda: [portable(one) for one in each])
        ids, many = as_ids(request_ids, len(each)), self._params(params, len(each))
        with self.names.under_way(request_ids, ids):
            outputs = self.backend.chat(each, many, ids, chat, stream=stream, delivered=delivered)
            async with aclosing(outputs):
                async for item in outputs:
                    yield item

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        return self.read_floor().under(as_params(params, count))

    async def tokenize(
        self,
        /,
        prompt: str | Messages,
        *,
        add_special_tokens: bool | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a text, or of a conversation; ``options`` of the latter as for ``chat``."""
        chat = ChatOptions.from_dict(options)
        if not isinstance(add_special_tokens, bool | None):
            raise InvalidRequest(
                f"add_special_tokens must be True, False or None, got {add_special_tokens!r:.80}"
            )
        given = prompt if isinstance(prompt, str) else as_conversation(prompt)
        await self.start()
        return await self.backend.tokenize(given, add_special_tokens, chat)

    async def render(self, messages: Messages, /, **variables: Any) -> str:
        """A conversation as the model's chat template renders it, up to the assistant's turn.

        ``variables`` are passed to the template: ``tools``, ``add_generation_prompt=False``, or
        any of its own.
        """
        given = as_conversation(messages)
        await self.start()
        return await self.backend.render(given, ChatOptions.of_variables(variables))

    def session(self, **variables: Any) -> AsyncSession:
        """A conversation of several turns that continues exact token ids.

        ``variables`` are passed to the chat template: ``tools``, or any of its own. Sampling
        parameters, the adapter included, are given with each turn.
        """
        if "adapter" in variables:
            raise InvalidRequest(
                "the adapter is named in each turn: session.chat(message, {'adapter': name})"
            )
        options = ChatOptions.of_variables(variables)
        return AsyncSession(self.backend, self.start, options, self.read_floor)

    async def abort(self, request_ids: str | Sequence[str] | None = None) -> int:
        """End one request, several, or all at the next step; returns how many were running or
        waiting, for a version or a grammar, too.

        Nothing is raised: samples come back as far as they got, with ``finish_reason`` "abort".
        An id that was given to a call of several prompts ends them all.
        """
        await self.start()
        names = as_texts(request_ids, "request_ids")
        return await self.backend.abort(None if names is None else self.names.ids_of(names))


async def in_order(outputs: Outputs) -> list[RequestOutput]:
    """Finished outputs in the order of the prompts; closing early aborts what still runs."""
    finished: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            finished[index] = output
    return [finished[index] for index in sorted(finished)]
