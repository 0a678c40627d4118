"""What stands behind a ``Rollout``: an engine of this process, a fleet's front, or a client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rollout.errors import EngineError
from rollout.generation import AnyPrompt, ChatOptions, Completion, RequestOutput, SamplingParams
from rollout.generation.metrics import EngineCounters, EngineStats
from rollout.rpc.convert import Messages
from rollout.rpc.tls import ServerTls
from rollout.weight_sync.protocol.channel import WeightChannel
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
from rollout.weight_sync.protocol.messages import Decision, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.publisher import UpdateOptions, WeightLink
from rollout.weights.adapters import AdapterLoaded
from rollout.wire.version import ServerInfo

if TYPE_CHECKING:  # a client needs no engine
    from rollout.api.prompts import PromptPreparer
    from rollout.config import EngineConfig
    from rollout.engine.tokenizer import Tokenizer
    from rollout.engine.updates.verbs.session import VerbSession

# (Index of the prompt in the call, output); closing it aborts what still runs.
Outputs = AsyncGenerator[tuple[int, RequestOutput]]


class Backend(Protocol):
    """Generation and control are async, in one loop; the weight verbs block, in any thread.

    ``generate`` and ``chat`` yield cumulative outputs with ``stream``, else one finished output per
    prompt. ``params`` and ``request_ids`` have one entry per prompt. Closing the iterator aborts
    what is still running.
    """

    @property
    def served(self) -> ServedBackend | None:
        """Itself, where this process serves it; None of a client, whose server is elsewhere."""
        ...

    @property
    def link(self) -> WeightLink:
        """What ``publish`` goes through; its ``info`` has transports in the caller's order."""
        ...

    @property
    def max_model_len(self) -> int:
        """Known once ``start`` is done; longer prompts are refused before their ids are read."""
        ...

    @property
    def seen(self) -> tuple[int | None, int]:
        """The epoch that is known, and the last version that this client has committed in it (0:
        none, or whoever commits here reads here).
        """
        ...

    async def start(self) -> None: ...

    @property
    def is_loading(self) -> bool:
        """Whether the engine has yet to start, and may still do so."""
        ...

    @property
    def waits_for(self) -> str:
        """While it is loading: what it waits for, and what to do about it; "" for itself alone."""
        ...

    async def state(self) -> str:
        """``EngineStats.state``, or "loading" before; never waits for a start."""
        ...

    def generate(
        self,
        prompts: Sequence[AnyPrompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        *,
        stream: bool,
    ) -> Outputs: ...

    def chat(
        self,
        conversations: Sequence[Messages],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str],
        options: ChatOptions,
        *,
        stream: bool,
        delivered: Sequence[tuple[Completion, ...]] | None = None,
    ) -> Outputs:
        """``delivered``: what another engine has answered of each, as a ``ContinuedPrompt``'s."""
        ...

    async def tokenize(
        self,
        prompt: str | Messages,
        add_special_tokens: bool | None = None,
        options: ChatOptions | None = None,
    ) -> list[int]: ...

    async def render(self, messages: Messages, options: ChatOptions) -> str:
        """The text of a conversation by the chat template."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int: ...

    async def server_info(self) -> ServerInfo: ...

    def end_calls(self, error: EngineError) -> None:
        """End every running call with ``error``, without waiting for that."""
        ...

    def leave(self) -> None:
        """Take no new requests, for good: the state is "leaving". What runs goes on."""
        ...

    @property
    def is_member(self) -> bool:
        """Whether a fleet's front counts on it."""
        ...

    @property
    def has_left(self) -> bool:
        """Once it ``leave``s: whether nothing runs any more, nor does a front count on it."""
        ...

    async def pause(self, mode: str, timeout: float) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int, mode: str, timeout: float) -> None: ...

    async def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None: ...

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None: ...

    async def stats(self) -> EngineStats: ...

    def info(self) -> WeightInfo: ...

    def open(self) -> WeightChannel: ...

    @property
    def prepared(self) -> str:
        """The update that waits for a decision; "" if there is none, or if only ``info`` knows."""
        ...

    def decide(self, decision: Decision) -> UpdateReceipt | None:
        """Commit or abort the update that is prepared; the receipt of a commit."""
        ...

    def serve(self, grant: Grant) -> Standing:
        """Take a lease from the fleet's coordinator, and answer where this member stands."""
        ...

    def send_to(self, request: SendTo, shown: ServerTls | None = None) -> UpdateReceipt:
        """Bring another engine to what is live here; its receipt. ``shown``: a certificate, where
        the other asks for one.
        """
        ...

    def update_from(self, path: str, options: UpdateOptions) -> UpdateReceipt:
        """Update from a directory that the engine's own host reads, under a ``weight_dirs``."""
        ...

    def rollback(self, timeout: float) -> UpdateReceipt: ...

    def prepare_rollback(self, request: PrepareRollback) -> None:
        """A member of a fleet votes to go back, and waits for a decision."""
        ...

    def digests(self, timeout: float) -> dict[str, int]: ...

    def receipts(self) -> tuple[UpdateReceipt, ...]: ...

    def load_lora_adapter(self, name: str, path: str, *, inplace: bool = False) -> AdapterLoaded:
        """Load the adapter of a PEFT directory as ``name``."""
        ...

    def unload_lora_adapter(self, name: str) -> bool:
        """Unload an adapter; returns whether it was loaded."""
        ...

    def save_sharded_state(self, path: str, timeout: float) -> int:
        """Every rank's live weights as files of this host; returns their version."""
        ...

    def collective_rpc(
        self, method: str, args: list[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        """What every rank's ``worker_extension_cls`` returns, by rank."""
        ...

    def committed(self, receipt: UpdateReceipt, *, partial: bool) -> None: ...

    async def disconnect(self) -> None:
        """Let go of what belongs to the running loop."""
        ...

    def close(self) -> None:
        """End for good, in the calling thread; after ``disconnect``. Idempotent."""
        ...


class ServedBackend(Backend, Protocol):
    """What servers need beside that: of an engine, or of a front that has members elsewhere."""

    @property
    def config(self) -> EngineConfig | None:
        """The engine's; None of a front."""
        ...

    @property
    def directory(self) -> str | None:
        """The engine's checkpoint; None of a front."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's, once it is loaded and if it has one; None of a front."""
        ...

    @property
    def prompts(self) -> PromptPreparer | None:
        """What makes token ids of prompts and chats; None where members do."""
        ...

    @property
    def verbs(self) -> VerbSession | None:
        """The low-level verbs, of which HTTP and gRPC share one session; None of a front that
        routes only, which takes no place in a trainer's group.
        """
        ...

    @property
    def counters(self) -> EngineCounters:
        """Where this process counts its updates, and notes what it follows."""
        ...

    @property
    def weight_dirs(self) -> Sequence[str]:
        """Directories under which updates may be read here."""
        ...

    @property
    def fleet(self) -> Members | None:
        """Who is in the fleet; None of one engine."""
        ...

    @property
    def replicas(self) -> StartedMembers | None:
        """Members that the front starts itself; None where it starts none."""
        ...

    @property
    def asleep(self) -> frozenset[str]:
        """Tags that a sleep has given up."""
        ...

    @property
    def max_adapters(self) -> int:
        """How many are served beside the weights; 0: none, whether or not some can be merged."""
        ...

    @property
    def adapter_limits(self) -> tuple[int, int] | None:
        """The largest rank and the number of adapters that may be loaded from a directory here;
        None where none may.
        """
        ...

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Of adapters that requests may name."""
        ...

    def load_lora_adapter(
        self, name: str, path: str, *, inplace: bool = False, anywhere: bool = True
    ) -> AdapterLoaded:
        """Unless ``anywhere``, ``path`` has to lie under a ``weight_dirs``."""
        ...

    def update_once(self, source: Any, options: UpdateOptions) -> UpdateReceipt:
        """Nothing new where the last one had this ``update_id``, and is live still."""
        ...

    async def routes(self, ask: AskRoutes) -> Routes:
        """Where a front that routes only finds members; ``ConfigError`` of one engine."""
        ...

    def report(self, ask: AskReport) -> Report:
        """What a member has to do, and has had; ``ConfigError`` of a front."""
        ...

    def note_routed(self, fleet: int, beginnings: Sequence[bytes]) -> None:
        """What a front says with a call: of which fleet it takes this for a member (0: of any), and
        the digests by which it knows each prompt. ``EngineClosed`` where it is mistaken.
        """
        ...

    def committed_at(self, version: int) -> float | None:
        """When a recent version went live, by ``time.monotonic()``; None: it is not known."""
        ...


class Members(Protocol):
    """Who is in a fleet. The fleet's own errors."""

    @property
    def epoch(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def fleet_id(self) -> int: ...

    def members(self) -> list[dict[str, Any]]:
        """Whether each serves, or why not; for people."""
        ...

    def add(
        self,
        address: str,
        token: str | None = None,
        name: str | None = None,
        *,
        tls_server_name: str | None = None,
        ask: bool = False,
    ) -> str: ...

    def leave(self, name: str, notice: float) -> None: ...


class StartedMembers(Protocol):
    """Those that a front starts itself, and starts anew where they end."""

    def describe(self) -> dict[str, Any]:
        """How many there are to be, and what those wait for that are not ready; for people."""
        ...

    def scale(self, count: int) -> None: ...

    def replace(self, name: str, notice: float) -> bool:
        """Start another in the place of ``name``; False: it is none of these."""
        ...
