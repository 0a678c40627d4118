"""An engine whose ranks are a trainer's own processes, and the verbs that all of them call.

Every rank makes the same calls in the same order (SPMD). The first one owns the scheduler; it acts,
and the others get the same result or the same error:

    every rank  agree: who is here, with the same arguments -> the first rank acts -> all hear how
                it went; meanwhile steps and commits reach the ranks' own threads in one order

An update is collective by itself: ``publish`` runs on every rank whose source is shared.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from rollout.api.arguments import (
    Params,
    Prompts,
    are_conversations,
    as_completions,
    as_prompts,
    check_scored,
    check_vectors,
)
from rollout.api.async_rollout import AsyncRollout
from rollout.api.backend import Backend
from rollout.api.colocated.rank_calls import RankCalls
from rollout.api.colocated.rank_sources import Drained, looked_at
from rollout.api.weight_verbs import WeightVerbs
from rollout.config import DEFAULT_TIMEOUT, EngineConfig, check_timeout, timeout_problem
from rollout.distributed import choose_device
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    RolloutError,
)
from rollout.generation import (
    ClassificationOutput,
    EmbeddingOutput,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    classify_params,
    embed_params,
    score_params,
    scored_rows,
)
from rollout.rpc.convert import Messages
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.rank_rendezvous import meet, met_at
from rollout.weight_sync.trainer.weight_report import WeightReport
from rollout.weight_sync.transports.host import host_id
from rollout.wire.spellings import VERBS, explains_arguments

if TYPE_CHECKING:
    from rollout.engine.executors.external import RankHost

T = TypeVar("T")

MEET_TIMEOUT = 600.0  # seconds: ranks may be far apart in what they do between two calls
CALL_TIMEOUT = 3600.0  # seconds for a generation, or an update, as a whole
_END_WAIT = 5.0
_SHARED, _STREAM, _WHOLE = "what ranks hold together", "an iterator", "whole weights"


@explains_arguments(VERBS, InvalidRequest)
class ColocatedRollout:
    """A rollout engine inside a trainer's ranks; made by ``Rollout.from_ranks`` on each of them.

    Every verb is collective: all ranks call it with the same arguments in the same order, and get
    the same result or the same error. Use it from one thread. ``engine`` is the whole ``Rollout``
    on the first rank (metrics, sessions, ``address`` for others), None on the others.
    """

    engine: Any

    def __init__(
        self,
        model: str | os.PathLike[str],
        group: Any,
        *,
        over: Callable[[Callable[[], AsyncRollout]], Any],
        meet_timeout: float,
        **engine_config: Any,
    ) -> None:
        """``over``: what makes the first rank's ``Rollout``."""
        if problem := timeout_problem(meet_timeout):
            raise ConfigError(f"meet_timeout {problem}")
        self.ranks, self._me = _ranks_of(group)
        size = len(self.ranks)
        stages = engine_config.setdefault("pipeline_parallel_size", 1)
        each = size // stages if type(stages) is int and stages > 0 else size
        given = engine_config.setdefault("tensor_parallel_size", each)
        if type(stages) is type(given) is int and given * stages != size:
            raise ConfigError(
                f"tensor_parallel_size={given}, pipeline_parallel_size={stages}, but the group has "
                f"{size} ranks: each is one rank of the engine; pass the group of the ranks that "
                "are to share a model"
            )
        executor = "inline" if size == 1 else "external"
        self.config = EngineConfig.from_dict(
            {"model": model, **engine_config, "executor": executor}
        )
        self._meet_timeout = meet_timeout
        self._calls = RankCalls(self.ranks, meet_timeout)
        self._host: RankHost | None = None
        self.engine = None
        try:
            self._start(over)
        except BaseException:
            self._close()
            raise
        backend = self.engine._async.backend if self.engine is not None else _Elsewhere()
        self._weights = WeightVerbs(cast(Backend, backend))

    # ---- generation ----

    def generate(
        self, prompts: Prompts, params: Params = None, *, timeout: float = CALL_TIMEOUT
    ) -> list[RequestOutput]:
        """As ``Rollout.generate``: the same outputs on every rank."""

        def act() -> list[RequestOutput]:
            return self._generated(lambda r: r.generate(prompts, params), timeout)

        return self._outputs("generate", [prompts, _plain_params(params)], act, timeout)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        timeout: float = CALL_TIMEOUT,
    ) -> list[RequestOutput]:
        """As ``Rollout.chat``: the same outputs on every rank."""

        def act() -> list[RequestOutput]:
            return self._generated(lambda r: r.chat(messages, params), timeout)

        return self._outputs("chat", [messages, _plain_params(params)], act, timeout)

    def embed(
        self,
        prompts: Prompts,
        *,
        normalize: bool = True,
        pooling: str = "last",
        dimensions: int | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> list[EmbeddingOutput]:
        """As ``Rollout.embed``: the same vectors on every rank."""

        def act() -> list[RequestOutput]:
            check_vectors(normalize, dimensions)
            return self._generated(lambda r: r.generate(prompts, embed_params(pooling)), timeout)

        said = [prompts, pooling, normalize, dimensions]
        return [
            EmbeddingOutput.of(output, normalize=normalize, dimensions=dimensions)
            for output in self._outputs("embed", said, act, timeout)
        ]

    def classify(
        self,
        prompts: Prompts | Messages | Sequence[Messages],
        *,
        pooling: str = "last",
        timeout: float = CALL_TIMEOUT,
    ) -> list[ClassificationOutput]:
        """As ``Rollout.classify``: the same logits on every rank."""

        def act() -> list[RequestOutput]:
            params = classify_params(pooling)
            if not are_conversations(prompts):
                return self._generated(lambda r: r.generate(prompts, params), timeout)
            verb = lambda r: r.chat(prompts, params, add_generation_prompt=False)  # noqa: E731
            return self._generated(verb, timeout)

        found = self._outputs("classify", [prompts, pooling], act, timeout)
        return [ClassificationOutput.of(output, pooling) for output in found]

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]] | None = None,
        *,
        top_logprobs: int = 0,
        last_n: int | None = None,
        temperature: float = 1.0,
        timeout: float = CALL_TIMEOUT,
    ) -> list[ScoreOutput]:
        """As ``Rollout.score``, of prompts that are lists of ids: the same on every rank."""

        def act() -> list[RequestOutput]:
            check_scored(prompts)
            room = self.engine._async.backend.max_model_len
            each: Any = as_prompts(prompts, room, score_params(0, 0, 1.0))
            if any(isinstance(one, str) or not isinstance(one, Sequence) for one in each):
                raise InvalidRequest("score takes lists of token ids here: tokenize texts first")
            rows, starts = scored_rows(each, as_completions(completions), last_n)
            params = [score_params(top_logprobs, start, temperature) for start in starts]
            return self._generated(lambda r: r.generate(rows, params), timeout)

        said = [prompts, completions, top_logprobs, last_n, temperature]
        return [ScoreOutput.of(output) for output in self._outputs("score", said, act, timeout)]

    # ---- weights ----

    def update_weights(self, source: Any, **options: Any) -> UpdateReceipt:
        """As ``Rollout.update_weights``; ``source`` is what this rank holds.

        What the ranks hold together (FSDP, ZeRO, DTensors) has to lie on this engine's ranks, and
        goes from shard to shard, without a gather. Of a dict, a plain module or a directory the
        first rank's is taken. An iterator is advanced on every rank in step, so that it may gather
        (``full_tensor()``); the first rank's values are taken.
        """
        self._calls.agree(
            "update_weights", sorted((key, repr(value)) for key, value in options.items())
        )
        source, first = self._looked_at("update_weights", source)
        if first == _SHARED:
            return self._weights.update_weights(source, **options)
        drained = source if isinstance(source, Drained) else Drained(iter(()))
        if first == _STREAM:
            drained.tell = self._tell
        failure = drained.drain() if self._me else None

        def act() -> UpdateReceipt:
            try:
                return self._weights.update_weights(source, **options)
            finally:
                drained.drain()  # the others are in the gathers that are left

        try:
            return self._calls.first_returns("update_weights", act, CALL_TIMEOUT, UpdateReceipt)
        except RolloutError as error:
            raise error from failure or error.__cause__

    def check_weights(self, source: Any, *, timeout: float = DEFAULT_TIMEOUT) -> WeightReport:
        """Name the tensors of ``source`` that differ from the live ones; no iterator."""
        self._calls.agree("check_weights", timeout)
        source, first = self._looked_at("check_weights", source)
        if first == _SHARED:
            return self._weights.check_weights(source, timeout=timeout)

        def act() -> WeightReport:
            return self._weights.check_weights(source, timeout=timeout)

        return self._calls.first_returns("check_weights", act, CALL_TIMEOUT, WeightReport)

    def weight_info(self) -> WeightInfo:
        """Which version is live, and what a full update must send."""
        self._calls.agree("weight_info", None)
        return self._calls.first_returns(
            "weight_info", self._weights.weight_info, DEFAULT_TIMEOUT, WeightInfo
        )

    @property
    def weight_version(self) -> int:
        """The live version; collective, as every verb."""
        return self.weight_info().version

    def rollback(self, timeout: float = DEFAULT_TIMEOUT) -> UpdateReceipt:
        """Serve the version before the last commit again, under a new number."""
        self._calls.agree("rollback", timeout)
        check_timeout(timeout)
        act = lambda: self._weights.rollback(timeout)  # noqa: E731
        return self._calls.first_returns("rollback", act, 4 * timeout, UpdateReceipt)

    # ---- memory ----

    def sleep(self, level: int = 1, mode: str = "keep", timeout: float = DEFAULT_TIMEOUT) -> None:
        """Free memory on every rank for the trainer's step, as ``Rollout.sleep`` does."""
        self._calls.agree("sleep", [level, mode, timeout])
        check_timeout(timeout)
        act = lambda: self.engine.sleep(level, mode, timeout)  # noqa: E731
        self._calls.first_does("sleep", act, 2 * timeout if mode == "wait" else timeout)

    def wake_up(self, tags: Sequence[str] | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Take it back: "weights", "kv_cache", or None for both; as ``Rollout.wake_up``."""
        self._calls.agree("wake_up", [tags, timeout])
        check_timeout(timeout)
        self._calls.first_does("wake_up", lambda: self.engine.wake_up(tags, timeout), timeout)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; not needed after an update."""
        self._calls.agree("reset_prefix_cache", None)
        self._calls.first_does(
            "reset_prefix_cache", lambda: self.engine.reset_prefix_cache(), DEFAULT_TIMEOUT
        )

    # ---- the end ----

    def shutdown(self) -> None:
        """End the engine on every rank; waits a few seconds for the others. Idempotent. In a
        forked process it ends nothing.
        """
        if not (self._calls.is_closed or self._calls.is_forked):
            with suppress(RolloutError):  # whoever does not come is gone, or will see us gone
                self._calls.group(_END_WAIT).exchange({}, _END_WAIT, "shutdown")
            self._close()

    def __enter__(self) -> Self:
        self._calls.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---- helpers ----

    def _looked_at(self, verb: str, source: Any) -> tuple[Any, str]:
        """``source`` as it is to be passed on, and what the first rank's is; where one rank's is of
        no use that is raised on all of them.
        """
        failure: Exception | None = None
        kind = _WHOLE
        try:
            source, shared = looked_at(source, self.ranks)
            kind = _SHARED if shared else _STREAM if isinstance(source, Drained) else _WHOLE
        except Exception as error:  # noqa: BLE001 - the trainer's own, which all ranks hear of
            failure = error
        kinds = self._calls.all_succeed(verb, failure, kind)
        for rank, other in zip(self.ranks, kinds, strict=True):
            if (other == _SHARED) != (kinds[0] == _SHARED):
                raise InvalidRequest(
                    f"rank {rank} passed {other} to {verb}, rank {self.ranks[0]} {kinds[0]}: every "
                    "rank passes its own part of one source"
                )
        return source, kinds[0]

    def _tell(self, failure: Exception | None) -> None:
        """How reading an iterator went here; raises where it went wrong on any rank."""
        self._calls.all_succeed("update_weights", failure, timeout=CALL_TIMEOUT)

    def _start(self, over: Callable[[Callable[[], AsyncRollout]], Any]) -> None:
        """Meet, agree on the settings, and load."""
        from rollout.api.embedded import EmbeddedBackend

        group, config = self._calls.group(), self.config
        mine = {"config": json.loads(json.dumps(config.to_dict())), "host": host_id()}
        said = group.exchange(mine, self._meet_timeout, "from_ranks")
        for rank, other in zip(self.ranks, said, strict=True):
            if other["config"] != said[0]["config"]:
                keys = ", ".join(
                    key for key, value in other["config"].items() if said[0]["config"][key] != value
                )
                raise ConfigError(
                    f"rank {rank} passed other settings to from_ranks than rank {self.ranks[0]} "
                    f"({keys}); they must be the same on every rank"
                )
        executor: Any = None
        if len(self.ranks) > 1:
            one_host = said[0]["host"] != "" and all(s["host"] == said[0]["host"] for s in said)
            executor = self._hosted(one_host)
        elif (device := _own_gpu(config)) is not None:
            from rollout.engine.executors.inline import InlineExecutor

            executor = InlineExecutor(config, device)

        def load() -> None:
            self.engine = over(lambda: AsyncRollout.over(EmbeddedBackend(config, executor)))

        try:
            self._calls.first_does("from_ranks", load, config.start_timeout)
        finally:
            if executor is not None and self.engine is None:
                executor.close()

    def _hosted(self, one_host: bool) -> Any:
        """This process's rank of the engine; on the first rank the way to all of them, too."""
        from rollout.engine.executors.external import ExternalExecutor, RankHost

        device = _own_gpu(self.config)
        links = meet(self._me, self.ranks, self._meet_timeout)
        if self._me:
            self._host = RankHost(links[0], device)
            return None
        ours, theirs = socket.socketpair()
        self._host = RankHost(theirs, device)
        host, links = met_at(links.values()), {0: ours, **links}
        return ExternalExecutor(self.config, links, host=host, one_host=one_host)

    def _outputs(
        self, verb: str, said: Any, act: Callable[[], list[RequestOutput]], timeout: float
    ) -> list[RequestOutput]:
        self._calls.agree(verb, said)
        return self._calls.outputs(verb, act, check_timeout(timeout))

    def _generated(self, verb: Callable[[Any], Any], timeout: float) -> list[RequestOutput]:
        """A verb of the first rank's engine, which is aborted after ``timeout`` seconds."""
        try:
            call = asyncio.wait_for(verb(self.engine._async), timeout)
            outputs: list[RequestOutput] = self.engine._loop.run(call)
            return outputs
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"the call did not end within {timeout:g} s") from error

    def _close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        if self._host is not None:
            if self._me:
                self._host.wait(_END_WAIT)  # the first rank hangs up when its engine has ended
            self._host.close()
        self._calls.close()


class _Elsewhere:
    """In the place of a backend on ranks that do not talk to the engine."""

    @property
    def link(self) -> Any:
        raise EngineClosed("only the first rank of a colocated engine talks to it")

    def committed(self, receipt: UpdateReceipt, *, partial: bool) -> None:
        """Nothing to remember."""


def _ranks_of(group: Any) -> tuple[tuple[int, ...], int]:
    """The job's ranks that make up the engine, and this one's place among them."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ConfigError("from_ranks has a group, but torch.distributed is not initialised")
        return (0,), 0
    if getattr(group, "ndim", None) == 1 and hasattr(group, "get_group"):  # a device mesh
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup | None):
        raise ConfigError(
            "group must be one of torch.distributed, a device mesh of one dimension, or None for "
            f"all ranks, got {group!r:.80}"
        )
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    here = dist.get_rank()
    if here not in ranks:
        raise ConfigError(
            f"rank {here} is not in the group of from_ranks, ranks {', '.join(map(str, ranks))}: "
            "call it on those alone"
        )
    return ranks, ranks.index(here)


def _own_gpu(config: EngineConfig) -> Any:
    """The GPU that this process has set, where the engine is to run on GPUs; else None."""
    if choose_device(config.device).type != "cuda":
        return None
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _plain_params(params: Any) -> Any:
    if isinstance(params, Sequence) and not isinstance(params, str):
        return [_plain_params(each) for each in params]
    if isinstance(params, SamplingParams | Mapping | None):
        return repr(SamplingParams.of(params))
    return repr(params)
