"""Client of a rollout service: the verbs of the embedded engine over gRPC.

Generation and control are ``grpc.aio`` in the caller's loop; weights are plain blocking gRPC in the
calling thread, where a trainer's collectives are. An error of the server arrives as its own class.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.config import DEFAULT_TIMEOUT
from rollout.distributed import local_address
from rollout.errors import (
    ConfigError,
    EngineClosed,
    EngineError,
    EngineRestarted,
    InvalidRequest,
    VersionConflict,
)
from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    Completion,
    ContinuedPrompt,
    RequestOutput,
    SamplingParams,
    VideoFile,
    parts_of,
)
from rollout.generation.metrics import EngineStats
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.address import split_address
from rollout.rpc.chunks import document, padded
from rollout.rpc.connection import Connection
from rollout.rpc.convert import (
    Messages,
    chat_options_to_json,
    conversation_to_proto,
    info_from_proto,
    messages_to_json,
    output_from_proto,
    params_to_proto,
    prompt_to_proto,
    stats_from_json,
)
from rollout.rpc.http_port import http_problem
from rollout.rpc.multiplex import Multiplex, read_ahead
from rollout.rpc.services import ControlStub, GenerationStub, WeightSyncStub
from rollout.rpc.status import error_from_rpc
from rollout.rpc.tls import ClientTls, ServerTls
from rollout.rpc.tls import problem as tls_problem
from rollout.rpc.update_channel import GrpcWeightChannel, feed
from rollout.weight_sync.protocol.membership import (
    AskReport,
    AskRoutes,
    Grant,
    PrepareRollback,
    Report,
    Routes,
    SendTo,
    Standing,
)
from rollout.weight_sync.protocol.messages import Decision, UpdateRequest, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.protocol.unload import unload
from rollout.weights.adapters import AdapterLoaded
from rollout.wire.codec import from_json
from rollout.wire.repeated import RepeatedReader, RepeatedWriter
from rollout.wire.version import (
    FEATURES,
    ServerInfo,
    agreed,
)

MAX_READ = 3600.0  # seconds in which a server reads a directory
SHARED = 1 << 20  # bytes of a request up to which its stream is shared: a refusal would end it
MAX_DECIDE = 600.0  # seconds in which a prepared update is committed or has gone back


class RolloutClient:
    """One service at ``address`` ("host:port"); ``timeout`` bounds each call but generation,
    and how long a generation waits for its ``min_version``.

    Remembers the epoch of the last commit it has seen: answers of another epoch raise
    ``EngineRestarted`` until a full update has committed there, unless ``keeps_epoch`` is False.
    Connecting is lazy.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        tls: ClientTls | None = None,
        *,
        keeps_epoch: bool = True,
    ) -> None:
        self.address, self.timeout = address, timeout
        self._keeps_epoch = keeps_epoch
        self.max_model_len = 0  # until ``start``
        self._tls = tls
        self._connection = Connection(address, token, tls)
        self._multiplex = self._new_multiplex()
        self._seen: tuple[int, int] | None = None
        self._met: Any = None  # the connection by which the service has said what it is
        self._life = 0  # its epoch then
        self._infos = RepeatedReader(WeightInfo, "tensors", "spelled", "quantized")
        self._requests = RepeatedWriter("metadata")
        self.features: tuple[str, ...] = ()  # of the service, until ``start``

    # ---- generation (async) ----

    def generate(
        self,
        prompts: Sequence[AnyPrompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        *,
        stream: bool,
        fleet: int = 0,
        beginnings: Sequence[bytes] = (),
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """(index of the prompt, output): cumulative ones with ``stream``, else one per prompt.

        ``fleet``: an engine that serves under no lease of this one refuses; 0: whoever it is.
        ``beginnings``: of each prompt, what it reports to fronts that it has had (``Routed``).
        """
        for feature in sorted(_needed(prompts)):
            if feature not in self.features:
                raise InvalidRequest(
                    f"the service at {self.address} is of a version without {feature} prompts"
                )
        if "score" not in self.features:
            params = [self._answered(one) for one in params]
        request = pb.GenerateRequest(
            prompts=map(prompt_to_proto, prompts, request_ids),
            params=map(params_to_proto, self._known(params)),
            stream=stream,
            routed=_routed(fleet, beginnings),
        )
        return self._outputs("Generate", request, params)

    def chat(
        self,
        conversations: Sequence[Messages],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        options: ChatOptions,
        *,
        stream: bool,
        delivered: Sequence[tuple[Completion, ...]] | None = None,
        fleet: int = 0,
        beginnings: Sequence[bytes] = (),
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        begun = delivered or [()] * len(conversations)
        if any(begun) and "continued_chats" not in self.features:
            raise InvalidRequest(
                f"the service at {self.address} is of a version without continued conversations"
            )
        request = pb.ChatRequest(
            conversations=map(conversation_to_proto, conversations, request_ids, begun),
            params=map(params_to_proto, self._known(params)),
            options_json=chat_options_to_json(options),
            stream=stream,
            routed=_routed(fleet, beginnings),
        )
        return self._outputs("Chat", request, params)

    async def tokenize(
        self,
        prompt: str | Messages,
        add_special_tokens: bool | None = None,
        options: ChatOptions | None = None,
    ) -> list[int]:
        if isinstance(prompt, str):
            with _on_the_wire("the prompt"):
                request = pb.TokenizeRequest(text=prompt, add_special_tokens=add_special_tokens)
        else:
            request = pb.TokenizeRequest(
                messages_json=messages_to_json(prompt),
                options_json=chat_options_to_json(options or ChatOptions()),
            )
        reply = await self._call(GenerationStub, "Tokenize", request)
        return list(reply.token_ids)

    async def render(self, messages: Messages, options: ChatOptions) -> str:
        request = pb.TokenizeRequest(
            messages_json=messages_to_json(messages),
            options_json=chat_options_to_json(options),
            render_only=True,
        )
        return str((await self._call(GenerationStub, "Tokenize", request)).text)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Abort these requests, or all; returns how many were running or waiting."""
        request = pb.AbortRequest(request_ids=request_ids or (), all=request_ids is None)
        return int((await self._call(GenerationStub, "Abort", request)).count)

    def end_calls(self, error: EngineError) -> None:
        """They are the service's: they go on there."""

    def leave(self) -> None:
        """The service goes on without this client."""

    is_member, has_left = False, True

    # ---- control (async) ----

    @property
    def seen(self) -> tuple[int | None, int]:
        """(epoch, version) of the last commit that this client has seen; without one the epoch that
        was met, and 0. (None, 0) of a service that knows no ``min_version_epoch``.
        """
        if "floors" not in self.features:
            return None, 0
        return self._seen or (self._life, 0)

    async def start(self) -> None:
        """Check that a service answers that speaks a version of the protocol that we do.

        It is asked once for each connection, and again where an output is of another epoch.
        """
        if self._met is not None and self._met == self._connection.made():
            return
        try:
            info = await self.server_info()
        except EngineClosed as error:
            if why := await asyncio.to_thread(self.problem):
                raise EngineClosed(f"cannot talk to {self.address}: {why}") from error
            raise
        agreed(info.speaks, f"the service at {self.address}")
        self.max_model_len = info.max_model_len
        self.features = info.features
        self._life, self._met = info.epoch, self._connection.made()

    def problem(self) -> str | None:
        """What is wrong with how we talk to whoever is there; None: nothing, or nobody is.

        Blocks, for some seconds at most.
        """
        try:
            found = (problem(self.address, self._tls) for problem in (tls_problem, http_problem))
            return next((why for why in found if why), None)
        except ConfigError as error:
            return str(error)

    @property
    def is_loading(self) -> bool:
        return False  # a service that answers has loaded

    waits_for = ""

    async def state(self) -> str:
        return (await self.server_info()).state

    async def _knows(self, feature: str) -> bool:
        """A front's verbs reach members that it has not called yet."""
        await self.start()
        return feature in self.features

    async def server_info(self) -> ServerInfo:
        return info_from_proto(await self._call(ControlStub, "ServerInfo", pb.ServerInfoRequest()))

    async def pause(self, mode: str, timeout: float) -> None:
        request = pb.PauseRequest(mode=mode, timeout=timeout)
        await self._call(ControlStub, "Pause", request, timeout)

    async def resume(self) -> None:
        await self._call(ControlStub, "Resume", pb.ResumeRequest())

    async def sleep(self, level: int, mode: str, timeout: float) -> None:
        if mode != "keep" and not await self._knows("sleep_modes"):
            raise InvalidRequest(
                f"the service at {self.address} is of a version that has no sleep but "
                f'mode="keep": call pause_generation({mode!r}) before it'
            )
        request = pb.SleepRequest(level=level, mode=mode, timeout=timeout)
        await self._call(ControlStub, "Sleep", request, 2 * timeout if mode == "wait" else timeout)

    async def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        if tags is not None and not tags:
            return  # over the wire no tags are both
        request = pb.WakeUpRequest(tags=tags or (), timeout=timeout)
        await self._call(ControlStub, "WakeUp", request, timeout)

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        if reset_running_requests and not await self._knows("resets"):
            raise InvalidRequest(
                f"the service at {self.address} is of a version that has no reset of running "
                "requests: call pause_generation('recompute') and resume_generation()"
            )
        request = pb.ResetPrefixCacheRequest(reset_running_requests=reset_running_requests)
        await self._call(ControlStub, "ResetPrefixCache", request)

    async def stats(self) -> EngineStats:
        return stats_from_json((await self._call(ControlStub, "Stats", pb.StatsRequest())).json)

    async def report(self, ask: AskReport, timeout: float) -> Report:
        """Of a member of a fleet: what it has to do, and has had."""
        request = document(ask)
        return from_json(
            Report, (await self._call(WeightSyncStub, "Report", request, timeout)).json
        )

    # ---- weights (blocking) ----

    served = None

    @property
    def link(self) -> RolloutClient:
        return self

    def info(self) -> WeightInfo:
        asked = pb.WeightInfoRequest(features=FEATURES)
        return self._infos.from_json(self._ask("Info", asked, self.timeout).json)

    @property
    def local_address(self) -> str:
        """The address of this machine on the interface that reaches the service."""
        return local_address(split_address(self.address)[0])

    def open(self) -> GrpcWeightChannel:
        """A channel for one update; its lease is one stream, opened by ``begin``."""
        return GrpcWeightChannel(
            self._connection,
            check_partial=self._check_partial,
            committed=self.committed,
            requests=self._requests,
        )

    def feed(self, commands: Iterator[Any], timeout: float) -> Any:
        """Bring an update there its buckets, by a stream of ``commands``: the call, once it was
        accepted, within ``timeout`` seconds.
        """
        with self._connection.errors():
            return feed(self._connection.sync(), self._connection.metadata, commands, timeout)

    joins = True

    def join(self, request: UpdateRequest, secret: str, lane: int) -> GrpcWeightChannel:
        """One more stream of an update that another trainer rank has begun."""
        channel = self.open()
        channel.join(request, secret, lane)
        return channel

    def update_from(self, path: str, options: Any) -> UpdateReceipt:
        """``options``: ``UpdateOptions``. The server goes on by itself where this call is lost."""
        said = json.dumps(options.to_server()).encode()
        with _on_the_wire("server_path"):
            request = pb.UpdateFromRequest(path=path, options_json=said)
        limit = max(MAX_READ, 10 * options.timeout)  # each wait there has its own
        reply = self._ask("UpdateFrom", request, limit)
        receipt = from_json(UpdateReceipt, reply.json)
        self.committed(receipt, partial=options.partial)
        return receipt

    @property
    def prepared(self) -> str:
        return ""

    def decide(self, decision: Decision) -> UpdateReceipt | None:
        # The update has deadlines of its own there.
        reply = self._ask("Decide", document(decision), MAX_DECIDE)
        if not reply.json:
            return None
        receipt = from_json(UpdateReceipt, reply.json)
        self.committed(receipt, partial=True)
        return receipt

    def serve(self, grant: Grant) -> Standing:
        return from_json(Standing, self._ask("Serve", padded(grant), self.timeout).json)

    def routes(self, ask: AskRoutes, timeout: float) -> Routes:
        """Of a fleet's coordinating front: who its members are, and how they are reached."""
        return from_json(Routes, self._ask("Routes", document(ask), timeout).json)

    def send_to(self, request: SendTo, shown: ServerTls | None = None) -> UpdateReceipt:
        """Have this engine bring another to its live version; the other's receipt."""
        limit = max(MAX_READ, 10 * request.timeout)  # each wait there has its own
        return from_json(UpdateReceipt, self._ask("SendTo", document(request), limit).json)

    def rollback(self, timeout: float) -> UpdateReceipt:
        limit = 3 * timeout + 1  # it takes the lease, then a step boundary
        reply = self._ask("Rollback", pb.RollbackRequest(timeout=timeout), limit)
        receipt = from_json(UpdateReceipt, reply.json)
        self.committed(receipt, partial=True)
        return receipt

    def prepare_rollback(self, request: PrepareRollback) -> None:
        """It takes the lease, and reads what it would go back to."""
        self._ask("PrepareRollback", document(request), 3 * request.timeout + 1)

    def digests(self, timeout: float) -> dict[str, int]:
        reply = self._ask("Digests", pb.DigestsRequest(timeout=timeout), timeout + 1)
        return dict(reply.digests)

    def load_lora_adapter(self, name: str, path: str, *, inplace: bool = False) -> AdapterLoaded:
        raise _not_from_here(
            "load_lora_adapter reads files",
            "; or send it from here: update_weights(adapters={name: directory})",
        )

    def unload_lora_adapter(self, name: str) -> bool:
        """Of an engine that serves them beside the weights, by a commit of its own."""
        info = self.info()
        if not info.max_adapters:
            raise _not_from_here("unload_lora_adapter takes what was merged out of the weights")
        return unload(info.adapters, self.open, name)

    def save_sharded_state(self, path: str, timeout: float) -> int:
        raise _not_from_here("save_sharded_state writes")

    def collective_rpc(
        self, method: str, args: list[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        raise _not_from_here("collective_rpc runs", "; or POST /collective_rpc to its server")

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        reply = self._ask("Receipts", pb.ReceiptsRequest(), self.timeout)
        return tuple(from_json(UpdateReceipt, document.json) for document in reply.receipts)

    def committed(self, receipt: UpdateReceipt, *, partial: bool) -> None:
        """Take note of a commit this client has seen; a full one makes a new epoch acceptable."""
        if not self._keeps_epoch:
            return
        if not partial or self._seen is None or self._seen[0] == receipt.epoch:
            self._seen = (receipt.epoch, receipt.version)

    async def disconnect(self) -> None:
        """Drop this loop's connection; a later call opens a new one."""
        self._met = None
        await self._multiplex.close()
        await self._connection.close_aio()

    def close(self) -> None:
        """Drop the blocking connection; a later call opens a new one."""
        self._connection.close_sync()

    # ---- helpers ----

    def _known(self, params: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
        """Without what a service of an earlier version knows nothing of, and can do without."""
        known: dict[str, Any] = {}
        known |= {} if "sessions" in self.features else {"session_id": None}
        known |= {} if "intervals" in self.features else {"stream_interval": 1}
        if all(getattr(one, name) == value for one in params for name, value in known.items()):
            return params
        return [replace(one, **known) for one in params]

    def _answered(self, params: SamplingParams) -> SamplingParams:
        """For a service that draws a token in any case; an embedding is beside it."""
        if params.max_tokens != 0:
            return params
        if params.prompt_logprobs is not None or params.pools_each or params.classifies:
            raise InvalidRequest(
                f"the service at {self.address} is of a version that scores nothing"
            )
        scored = 0 if params.pooling == "mean" else None
        return replace(params, max_tokens=1, ignore_eos=True, prompt_logprobs=scored)

    def _outputs(
        self, method: str, request: Any, params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        outputs = self._called(method, request)
        wanted = max((one.min_version or 0 for one in params), default=0)
        known = 0 if self._seen is None else self._seen[1]
        # A fleet's front, which keeps no epoch, chooses who has the version.
        return outputs if wanted <= known or not self._keeps_epoch else self._live(outputs, wanted)

    async def _live(
        self, outputs: AsyncGenerator[tuple[int, RequestOutput]], version: int
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """``outputs``; ``VersionConflict`` where ``version`` is not live within ``timeout`` s."""
        async with aclosing(outputs):
            first = asyncio.ensure_future(anext(outputs))
            try:
                await asyncio.wait((first,), timeout=self.timeout)
                if not first.done() and (info := await self.server_info()).version < version:
                    raise VersionConflict(
                        f"version {version} was asked for (min_version) and did not become live "
                        f"within this client's timeout of {self.timeout:g} s: version "
                        f"{info.version} is, at {self.address}; update the weights, ask for that "
                        "or less, or connect with a longer timeout"
                    )
                yield await first
            except StopAsyncIteration:
                return
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            async for item in outputs:
                yield item

    def _called(self, method: str, request: Any) -> AsyncGenerator[tuple[int, RequestOutput]]:
        if request.stream and "multiplex" in self.features:
            # One of its own still says of each row what is new, and not all again.
            shared = self._multiplex if request.ByteSize() <= SHARED else self._new_multiplex()
            return shared.outputs(**{method.lower(): request})
        alone = self._alone(method, request)
        return read_ahead(alone) if request.stream else alone

    def _check(self, output: RequestOutput) -> None:
        if output.epoch != self._life:
            self._met = None
        self._check_epoch(output.epoch)

    async def _alone(self, method: str, request: Any) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """By a call of its own."""
        stub = GenerationStub(self._connection.aio())
        call = getattr(stub, method)(request, metadata=self._connection.metadata)
        try:
            with self._connection.errors():
                async for reply in call:
                    output = output_from_proto(reply.output)
                    self._check(output)
                    yield reply.index, output
        finally:
            call.cancel()  # the server aborts what is still running; no effect on an ended call

    def _new_multiplex(self) -> Multiplex:
        lost = partial(error_from_rpc, address=self.address)
        return Multiplex(self._multiplexed, lost, self._check)

    def _multiplexed(self, commands: Any) -> Any:
        stub = GenerationStub(self._connection.aio())
        return stub.Multiplex(commands, metadata=self._connection.metadata)

    def _check_partial(self) -> None:
        """A partial update builds on weights this client has seen: not on another engine life's."""
        if self._seen is not None:
            self._check_epoch(self.info().epoch)

    def _check_epoch(self, epoch: int) -> None:
        if self._seen is not None and epoch != self._seen[0]:
            raise EngineRestarted(
                f"the engine at {self.address} has restarted: epoch {epoch}, but version "
                f"{self._seen[1]} was committed in epoch {self._seen[0]}; its weights are not "
                "yours until you send a full update"
            )

    def _ask(self, method: str, request: Any, timeout: float) -> Any:
        return self._connection.ask(WeightSyncStub, method, request, timeout)

    async def _call(
        self, stub: Any, method: str, request: Any, timeout: float | None = None
    ) -> Any:
        limit = self.timeout if timeout is None else timeout + 1  # the server's own limit first
        return await self._connection.call(stub, method, request, limit)


@contextmanager
def _on_the_wire(what: str) -> Iterator[None]:
    """Half of a surrogate pair, as Python has of a file's name that is no UTF-8, has no form."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is not Unicode text: {error}") from error


def _needed(prompts: Sequence[AnyPrompt]) -> set[str]:
    """What a service must know of to take them."""
    needed = set()
    for prompt in prompts:
        _, shown, _ = parts_of(prompt)
        kinds = {
            "images": shown.images,
            "videos": shown.videos,
            "video_files": any(isinstance(video, VideoFile) for video in shown.videos),
            "continued": isinstance(prompt, ContinuedPrompt),
        }
        needed |= {kind for kind, is_there in kinds.items() if is_there}
    return needed


def _routed(fleet: int, beginnings: Sequence[bytes]) -> Any:
    return pb.Routed(fleet=fleet, beginnings=beginnings) if fleet or beginnings else None


def _not_from_here(what: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"{what} where the engine's ranks run: call it on the Rollout that owns the engine, not on "
        f"a client{instead}"
    )
