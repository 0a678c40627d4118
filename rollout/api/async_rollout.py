"""``AsyncRollout``: an engine in this process or elsewhere, behind the same awaitable verbs."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

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
    one_of,
)
from rollout.api.backend import Backend, Outputs
from rollout.api.image_inputs import has_images, portable, with_images
from rollout.api.read_floor import ReadFloor
from rollout.api.session import AsyncSession
from rollout.api.session_store import Sessions
from rollout.api.verb_threads import VerbThreads
from rollout.api.weight_verbs import WeightVerbs
from rollout.config import DEFAULT_TIMEOUT, EngineConfig, check_timeout, timeout_problem
from rollout.errors import ConfigError, InvalidRequest
from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    ClassificationOutput,
    ContinuedPrompt,
    EmbeddingOutput,
    ImagePrompt,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    classify_params,
    embed_params,
    score_params,
    scored_rows,
)
from rollout.generation.metrics import EngineStats
from rollout.rpc.address import split_address
from rollout.rpc.client import RolloutClient
from rollout.rpc.convert import Messages
from rollout.rpc.tls import ClientTls
from rollout.wire.spellings import VERBS, explains_arguments
from rollout.wire.version import ServerInfo

P = ParamSpec("P")
R = TypeVar("R")

# Looked up when first served: api imports no server.
GRPC_SERVER = "rollout.server.grpc.server:serve"


def _in_thread(
    method: Callable[Concatenate[WeightVerbs, P], R],
) -> Callable[Concatenate[AsyncRollout, P], Coroutine[Any, Any, R]]:
    """A weight verb, awaitable: runs in a thread, and to its end even when cancelled."""

    async def verb(self: AsyncRollout, /, *args: P.args, **kwargs: P.kwargs) -> R:
        await self.start()
        return await self.threads.run(lambda: method(self.weights, *args, **kwargs))

    update_wrapper(verb, method)
    return verb


def _at_once(
    method: Callable[Concatenate[WeightVerbs, P], R],
) -> Callable[Concatenate[AsyncRollout, P], Coroutine[Any, Any, R]]:
    """The same for a verb that never waits for an update: the loop's own threads will do."""

    async def verb(self: AsyncRollout, /, *args: P.args, **kwargs: P.kwargs) -> R:
        await self.start()
        return await asyncio.to_thread(method, self.weights, *args, **kwargs)

    update_wrapper(verb, method)
    return verb


@explains_arguments(VERBS, InvalidRequest)
class AsyncRollout:
    """A rollout service, embedded (``AsyncRollout(model, **EngineConfig fields)``) or connected.

    The engine starts with ``start``, ``async with`` or the first verb. Use it from one event loop.
    """

    def __init__(self, model: str | os.PathLike[str], **engine_config: Any) -> None:
        from rollout.api.embedded import EmbeddedBackend

        config = EngineConfig.from_dict({"model": model, **engine_config})
        self._set_up(EmbeddedBackend(config), None)

    @classmethod
    def connect(
        cls,
        address: str,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        tls: ClientTls | None = None,
        min_version: int = 0,
    ) -> Self:
        """Connect to the gRPC server at "host:port"; ``timeout`` bounds all but generation.

        ``min_version``: see the property.
        """
        split_address(address)
        if not isinstance(tls, ClientTls | None):
            raise ConfigError(f"tls must be a ClientTls(ca=...), or None, got {tls!r:.80}")
        if problem := timeout_problem(timeout):
            raise ConfigError(f"timeout {problem}")
        self = cls.__new__(cls)
        self._set_up(RolloutClient(address, token, timeout, tls=tls), address)
        self.min_version = min_version
        return self

    @classmethod
    def over(cls, backend: Backend) -> Self:
        """The same verbs over an existing backend; ``shutdown`` closes it."""
        self = cls.__new__(cls)
        self._set_up(backend, None)
        return self

    def _set_up(self, backend: Backend, address: str | None) -> None:
        self.backend = backend
        self.weights = WeightVerbs(backend)
        self.threads = VerbThreads()
        self._floor = ReadFloor()
        self._address = address
        self._served_as: tuple[str, int, dict[str, Any]] | None = None
        self._server: Any = None
        self._serving = asyncio.Lock()
        self.sessions = Sessions(self.session)  # those that HTTP clients name

    async def start(self) -> None:
        """Load the model (or check that the service answers). Idempotent."""
        await self.backend.start()

    async def state(self) -> str:
        """``EngineStats.state``, or "loading" until ``start`` is done, which this never waits for.

        Requests are served while it is "running".
        """
        return await self.backend.state()

    @property
    def min_version(self) -> int:
        """The oldest version that requests take which ask for none (``SamplingParams.min_version``;
        0, the default: any). They wait for it, at most the engine's timeout.

        It counts in the epoch of the engine, or fleet, that is there when it is first used: in
        another one requests end with ``EngineRestarted``, until it is set anew, or this client has
        committed there. Requests of a client that has updated weights ask for its last commit
        without it.
        """
        return self._floor.version

    @min_version.setter
    def min_version(self, version: int) -> None:
        self._floor = ReadFloor.of(version)

    def read_floor(self) -> ReadFloor:
        """What requests may not be older than, by ``min_version`` and by this client's commits."""
        epoch, committed = self.backend.seen
        if self._floor.epoch is None:
            self._floor = replace(self._floor, epoch=epoch)
        return ReadFloor(committed, epoch).joined(self._floor)

    # ---- generation ----

    async def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        sampling_params: Params = None,
        images: Sequence[Any] | None = None,
        request_ids: Sequence[str] | None = None,
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
        request_ids: Sequence[str] | None = None,
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
        request_ids: Sequence[str] | None = None,
    ) -> list[EmbeddingOutput]:
        """One embedding per prompt: the last token's hidden state after the model's final norm.

        ``pooling="mean"`` takes the mean over all tokens instead. ``dimensions`` keeps that many
        leading numbers. The vector has length 1 unless ``normalize`` is False. ``adapter``: which
        adapter the model runs with. Prompts are given as for ``generate`` and run in the same
        steps. ``RequestAborted`` if one was aborted, ``EngineError`` if the weights give NaN.
        """
        if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
            raise InvalidRequest(f"dimensions must be 1 or more, got {dimensions!r:.80}")
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
        request_ids: Sequence[str] | None = None,
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
        request_ids: Sequence[str] | None = None,
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
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidRequest(
                "prompts must be a list of texts or of lists of token ids, got "
                f"{type(prompts).__name__}: wrap one text as [text], use .tolist() on an array"
            )
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
            elif isinstance(prompt, ImagePrompt | ContinuedPrompt):
                raise InvalidRequest("score takes texts and lists of token ids, no images")
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
        request_ids: Sequence[str] | None = None,
        stream: bool = True,
    ) -> Outputs:
        """(index of the prompt, output) as they finish; with ``stream`` cumulative ones, too."""
        await self.start()
        each = as_prompts(prompts, self.backend.max_model_len, params)
        ids, many = as_ids(request_ids, len(each)), self._params(params, len(each))
        outputs = self.backend.generate(each, many, ids, stream=stream)
        async with aclosing(outputs):
            async for item in outputs:
                yield item

    async def stream_chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        request_ids: Sequence[str] | None = None,
        stream: bool = True,
        **options: Any,
    ) -> Outputs:
        """As ``stream_many``, for conversations; ``options`` as for ``chat``."""
        chat = ChatOptions.from_dict(options)
        await self.start()
        each = as_conversations(messages)
        if any(has_images(one) for one in each):
            each = await asyncio.to_thread(lambda: [portable(one) for one in each])
        ids, many = as_ids(request_ids, len(each)), self._params(params, len(each))
        outputs = self.backend.chat(each, many, ids, chat, stream=stream)
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
        return AsyncSession(self.backend, options, self.read_floor)

    async def abort(self, request_ids: str | Sequence[str] | None = None) -> int:
        """End one request, several, or all at the next step; returns how many were running.

        Nothing is raised: samples come back as far as they got, with ``finish_reason`` "abort".
        """
        await self.start()
        return await self.backend.abort(as_texts(request_ids, "request_ids"))

    # ---- control ----

    async def server_info(self) -> ServerInfo:
        """Model name, epoch, version, state, longest sequence and ranks of the engine."""
        await self.start()
        return await self.backend.server_info()

    async def pause_generation(self, mode: str = "keep", timeout: float = DEFAULT_TIMEOUT) -> None:
        """Stop stepping; new requests wait in the queue.

        ``mode`` says what becomes of running requests: "keep" them as they are, "recompute" their
        KV on resuming, "wait" for them to finish, or "abort" them (``finish_reason`` "abort").
        ``timeout``: seconds, at most a day. If "wait" takes longer, generation goes on as before
        and ``DeadlineExceeded`` is raised.
        """
        await self.start()
        if not isinstance(mode, str):
            raise InvalidRequest(f"pause mode must be a text, such as 'keep', got {mode!r:.80}")
        await self.backend.pause(mode, check_timeout(timeout))

    async def resume_generation(self) -> None:
        """Step again after ``pause_generation``; does nothing if generation is not paused."""
        await self.start()
        await self.backend.resume()

    async def sleep(
        self, level: int = 1, mode: str = "keep", timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Free device memory. Level 1 frees the KV cache and moves the weights to host memory;
        level 2 drops the weights, so that a full update is needed.

        ``mode`` says what becomes of running requests: "keep" freezes them until ``wake_up``,
        "wait" lets them finish first (``DeadlineExceeded``, and the engine stays awake, where they
        do not in ``timeout`` seconds), "abort" ends them (``finish_reason`` "abort").
        """
        await self.start()
        if not isinstance(mode, str):
            raise InvalidRequest(f"sleep mode must be a text, such as 'keep', got {mode!r:.80}")
        if type(level) is not int or level not in (1, 2):
            raise InvalidRequest(f"sleep level must be 1 or 2, got {level!r:.80}")
        await self.backend.sleep(level, mode, check_timeout(timeout))

    async def wake_up(
        self, tags: str | Sequence[str] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Bring back what ``sleep`` freed: ``tags`` "weights", "kv_cache", or None for both."""
        await self.start()
        await self.backend.wake_up(as_texts(tags, "tags"), check_timeout(timeout))

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; not needed after an update."""
        await self.start()
        await self.backend.reset_prefix_cache()

    async def metrics(self) -> EngineStats:
        """A snapshot of the engine's metrics."""
        await self.start()
        return await self.backend.stats()

    # ---- weights ----

    update_weights = _in_thread(WeightVerbs.update_weights)
    weight_info = _at_once(WeightVerbs.weight_info)
    rollback = _in_thread(WeightVerbs.rollback)
    receipts = _at_once(WeightVerbs.receipts)
    check_weights = _in_thread(WeightVerbs.check_weights)
    preflight = _in_thread(WeightVerbs.preflight)
    load_lora_adapter = _in_thread(WeightVerbs.load_lora_adapter)
    unload_lora_adapter = _in_thread(WeightVerbs.unload_lora_adapter)
    save_sharded_state = _in_thread(WeightVerbs.save_sharded_state)

    @property
    def weight_version(self) -> Coroutine[Any, Any, int]:
        """The live version: ``await r.weight_version``."""
        return self._version()

    async def _version(self) -> int:
        return (await self.server_info()).version

    # ---- serving and the end ----

    @property
    def address(self) -> Coroutine[Any, Any, str]:
        """The "host:port" for others to connect to: ``await r.address``; serves on loopback."""
        return self.serve()

    async def serve(self, /, host: str = "127.0.0.1", port: int = 0, **options: Any) -> str:
        """Serve this engine over gRPC, once; port 0 picks a free one. Returns "host:port".

        ``options`` are those of ``server.grpc.server.serve``. Once it is served, the same call
        gives its address again. Raises ``ConfigError`` naming a busy port, or where it is served
        otherwise already.
        """
        if not isinstance(host, str) or type(port) is not int or not 0 <= port < 1 << 16:
            raise ConfigError(
                f"serve takes a host and a port of 0..65535, got {host!r:.80} and {port!r:.80}"
            )
        async with self._serving:
            asked = host, port, options
            if self._address is not None and (options or port) and asked != self._served_as:
                raise ConfigError(
                    f"it is served at {self._address} already; an engine has one gRPC server"
                )
            if self._address is None:
                await self.start()
                module, _, name = GRPC_SERVER.partition(":")
                serve = getattr(importlib.import_module(module), name)
                self._server = await serve(self, host, port, **options)
                self._address, self._served_as = str(self._server.address), asked
            return self._address

    async def shutdown(self) -> None:
        """End the server, the engine and its processes; a connected one only disconnects."""
        await self.disconnect()
        await asyncio.to_thread(self.backend.close)

    async def disconnect(self) -> None:
        """The part of ``shutdown`` that belongs to the loop: end the server and connections."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        await self.backend.disconnect()
        self.threads.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


async def in_order(outputs: Outputs) -> list[RequestOutput]:
    """Finished outputs in the order of the prompts; closing early aborts what still runs."""
    finished: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            finished[index] = output
    return [finished[index] for index in sorted(finished)]
