"""verl 0.9: the engine as ``actor_rollout_ref.rollout.name=rollout``; importing this registers it.

    trainer's worker   ServerAdapter  -- weights over gRPC, in verl's own lockstep -->  Server
    agent loops        verl's client  -- token ids over Ray -->                          (Ray actor,
    verl's driver      Replica        -- starts it; sleep, abort, resume -->               embedded)

Where trainer and rollout are apart, weights go by ``verl_checkpoint.TransportEngine``.
verl loads it through the entry-point group ``verl.plugins``, or by
``VERL_USE_EXTERNAL_MODULES=rollout.integrations.verl``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)

from rollout.api import AsyncRollout, Rollout
from rollout.distributed.native_thread import on_this_stream
from rollout.errors import ConfigError, EngineError, InvalidRequest
from rollout.generation import NAN_LOGITS, RequestOutput, SamplingParams
from rollout.generation.all_layers import of_all_layers
from rollout.integrations.teacher_rows import teacher_rows
from rollout.integrations.verl_checkpoint import NAME, drain, pulled, server_name
from rollout.integrations.verl_section import check_section, engine_settings, replica_ranks


class Server:
    """One replica: tokens in, tokens out. A Ray actor; its ranks are processes on its node.

    ``apart``: the trainer may be on another node. Weights are then taken on the node's own address,
    by a token; else on loopback. ``gpu_share``: ``gpu_memory_utilization``, where there is a GPU.
    ``seed``: where it is given, requests without one have seeds that are the same in every run.
    ``logprobs_mode``: which logprobs answers have, "raw_logprobs" or "processed_logprobs".
    ``defaults``: sampling parameters where a request says nothing.
    """

    def __init__(
        self,
        model: str,
        settings: dict[str, Any],
        limits: dict[str, int],
        *,
        apart: bool = False,
        gpu_share: float | None = None,
        seed: int | None = None,
        logprobs_mode: str = "processed_logprobs",
        **defaults: Any,
    ) -> None:
        if settings.get("device") != "cpu" and torch.cuda.is_available():
            settings = {"gpu_memory_utilization": gpu_share, **settings}
        self._rollout = AsyncRollout(model, **settings)
        self._limits, self._apart, self._defaults = limits, apart, defaults
        self._is_raw = logprobs_mode == "raw_logprobs"
        self._seed, self._asked = seed, Counter[bytes]()  # the same requests since the last step
        self._numbers = itertools.count()
        self._token = secrets.token_urlsafe(32) if apart else None
        self._admits = asyncio.Event()  # requests that come while it is not set wait for it,
        self._admits.set()
        self._rejecting = False  # or are answered "aborted"
        self._steps: dict[int, int] = {}  # the trainer's step by version

    async def launch_server(self) -> str:
        """Load the model; "host:port" with its node's address, by which verl's router tells
        replicas apart.
        """
        address, _ = await self.reached_at()
        return f"{ray.util.get_node_ip_address()}:{address.rpartition(':')[2]}"

    async def reached_at(self) -> tuple[str, str | None]:
        """Where trainers send weights and the token for it; Ray's actors alone can ask."""
        host = ray.util.get_node_ip_address() if self._apart else "127.0.0.1"
        address = await self._rollout.serve(host, token=self._token, insecure=self._apart)
        return address, self._token

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
        **_: Any,
    ) -> TokenOutput:
        """What was sampled; "aborted" with the tokens so far after ``abort_all_requests``, and
        where logits were not numbers.

        ``extra_fields``: ``min_global_steps`` and ``max_global_steps`` are those of the weights
        that made the tokens, ``global_steps`` the last token's. ``prompt_ids`` and
        ``prompt_logprobs``, where ``prompt_logprobs`` were asked for: as its distillation reads
        them (``teacher_rows``), at the temperature of the request.
        """
        if image_data or video_data or audio_data:
            raise InvalidRequest("this engine takes text alone, no images, videos or audio")
        while not self._admits.is_set():
            if self._rejecting:  # verl's client asks another replica
                return TokenOutput(
                    token_ids=[], log_probs=[], stop_reason="aborted", num_preempted=0
                )
            await self._admits.wait()
        given = dict(sampling_params)
        if self._seed is not None:
            given.setdefault("seed", self._own_seed(request_id, prompt_ids))
        wanted = given.get("logprobs", False) not in (None, False)
        params = self._params(list(prompt_ids), given)
        own_id = f"{request_id}-{next(self._numbers)}"  # verl's may occur twice at a time
        [output] = await self._rollout.generate([list(prompt_ids)], params, request_ids=[own_id])
        return self._answer(output, wanted, params.prompt_logprobs or 0)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._rollout.wake_up(tags)

    async def sleep(self, level: int = 1) -> None:
        await self._rollout.sleep(level)

    async def clear_kv_cache(self) -> None:
        await self._rollout.reset_prefix_cache()

    async def release_kv_cache(self) -> None:
        """Nothing: an update is staged beside the live weights and keeps the cache's memory."""

    async def resume_kv_cache(self) -> None:
        """Nothing was released."""

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Running requests end with what they have; new ones wait for ``resume_generation``, also
        while the engine sleeps, or with ``reject_request`` are answered "aborted" at once.
        """
        self._admits.clear()
        self._rejecting = reject_request
        running = (await self._rollout.metrics()).running
        await self._rollout.pause_generation("abort")
        return {"aborted_count": running, "request_ids": []}

    async def resume_generation(self) -> None:
        await self._rollout.resume_generation()
        self._rejecting = False
        self._admits.set()

    async def set_global_steps(self, global_steps: int, version: int | None = None) -> None:
        """The weights of ``version`` (None: the live ones) are those of this step."""
        if version is None:
            version = (await self._rollout.server_info()).version
        self._steps[version] = global_steps
        self._asked.clear()

    async def weight_version(self) -> int:
        return (await self._rollout.server_info()).version

    async def start_profile(self, **_: Any) -> None:
        """Nothing to do: spans are measured by ``rollout bench --profile``."""

    async def stop_profile(self) -> None:
        """As ``start_profile``."""

    async def shutdown(self) -> None:
        await self._rollout.shutdown()

    def _own_seed(self, request_id: str, prompt_ids: Sequence[int]) -> int:
        """Of the request, the trainer's step and, among equal requests (those of a group), which
        one it is: under ``full_determinism`` verl gives them the same id.
        """
        step = max(self._steps.values(), default=None)
        said = f"{self._seed}/{step}/{request_id}/{list(prompt_ids)}".encode()
        request = blake2b(said, digest_size=16).digest()
        self._asked[request] += 1
        which = self._asked[request].to_bytes(8, "little")
        return int.from_bytes(blake2b(request + which, digest_size=7).digest(), "little")

    def _params(self, prompt: list[int], given: dict[str, Any]) -> SamplingParams:
        """verl's names; without a limit the response's length, and never beyond the model's."""
        limits = self._limits
        asked, other = given.pop("max_tokens", None), given.pop("max_new_tokens", None)
        asked = other if asked is None else asked
        if asked is None:
            left = limits["prompt_length"] + limits["response_length"] - len(prompt)
            asked = min(limits["response_length"], left)
        room = limits["max_model_len"] - len(prompt)
        top = given.pop("logprobs", None)
        given["logprobs"] = None if top in (None, False, True) else top
        if given.get("prompt_logprobs") is not None and given.get("temperature", 1.0) >= 1e-5:
            given.setdefault("prompt_temperature", given.get("temperature", 1.0))
        given |= {"max_tokens": max(1, min(asked, room))}
        return SamplingParams.from_dict({**self._defaults, **given})

    def _answer(self, output: RequestOutput, wanted: bool, top: int) -> TokenOutput:
        [sample] = output.outputs
        logprobs = sample.logprobs.raw if self._is_raw else sample.logprobs.processed
        if sample.stop_reason == NAN_LOGITS:  # of "aborted" ones verl asks for the rest
            raise EngineError("the sample ended early: its logits were not numbers; see the log")
        steps = [self._steps.get(span.version) for span in sample.weight_versions]
        known = [step for step in steps if step is not None]
        fields: dict[str, Any] = {
            "global_steps": steps[-1] if steps else None,
            "min_global_steps": min(known, default=None),
            "max_global_steps": max(known, default=None),
            "num_cached_tokens": output.num_cached_tokens,
            "weight_versions": [(s.version, s.start, s.stop) for s in sample.weight_versions],
        }
        if output.prompt_logprobs is not None:
            rows = teacher_rows(output.prompt_token_ids, output.prompt_logprobs, top)
            fields["prompt_ids"], fields["prompt_logprobs"] = rows
        return TokenOutput(
            token_ids=sample.token_ids,
            log_probs=logprobs if wanted else None,
            routed_experts=of_all_layers(output, sample),
            stop_reason="aborted" if sample.is_cut_short else "completed",
            num_preempted=0,
            extra_fields=fields,
        )


class Replica(RolloutReplica):  # type: ignore[misc]
    """Starts one ``Server`` on the node of its first worker; all ranks on that node."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        check_section(config)
        super().__init__(replica_rank, config, *args, **kwargs)
        if self.is_reward_model:
            raise ConfigError(
                "verl asks reward models over HTTP, which a replica of this engine does not serve: "
                "set reward.reward_model.rollout.name=vllm or sglang, or ask a `rollout serve` of "
                "your own from a custom reward function"
            )
        if self.nnodes > 1:
            raise ConfigError(
                f"a replica of {self.world_size} ranks spans {self.nnodes} nodes: this engine's "
                "ranks are on one; lower tensor_model_parallel_size, or "
                "pipeline_model_parallel_size"
            )

    async def sleep(self) -> None:
        """verl calls it in any case, and wakes up only where memory changes hands."""
        if self.config.free_cache_engine and self.rollout_mode is not RolloutMode.STANDALONE:
            await super().sleep()

    async def launch_servers(self) -> None:
        found = await asyncio.gather(*(w.__ray_call__.remote(_place) for w in self.workers))
        nodes, gpus = zip(*found, strict=True)
        server = ray.remote(Server).options(
            name=server_name(self.replica_rank, self.name_suffix),
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[0], soft=False),
            runtime_env={"env_vars": _sees([each for own in gpus for each in own])},
        )
        config = self.config
        longest = config.max_model_len or config.prompt_length + config.response_length
        limits = {
            "prompt_length": config.prompt_length,
            "response_length": config.response_length,
            "max_model_len": longest,
        }
        path = getattr(self.model_config, "local_path", None) or self.model_config.path
        apart = self.rollout_mode is RolloutMode.STANDALONE and len(_nodes()) > 1
        seed = config.seed + self.replica_rank
        settings = {
            "seed": seed,
            "trust_remote_code": bool(getattr(self.model_config, "trust_remote_code", False)),
            **engine_settings(config, longest),
        }
        handle = server.remote(
            path,
            settings,
            limits,
            apart=apart,
            gpu_share=config.gpu_memory_utilization,
            seed=seed if config.full_determinism else None,
            logprobs_mode=config.logprobs_mode or "raw_logprobs",  # as vLLM's own default
            return_routed_experts=config.enable_rollout_routing_replay,
            ignore_eos=config.ignore_eos,
            repetition_penalty=config.repetition_penalty,
        )
        self.servers.append(handle)
        self._server_handle = handle
        self._server_address = await handle.launch_server.remote()


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """On every worker of the trainer; the first of each replica sends the weights."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        check_section(self.config)
        size = replica_ranks(self.config)
        rank = int(os.environ.get("RANK", "0"))
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None
        self._rollout: Rollout | None = None

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._handle().wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._handle().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Make what ``weights`` yields the next version; every worker reads it to its end.

        A failure raises here, and the old version serves on.
        """
        if wire_format == NAME:
            return  # the trainer's first rank has sent them by itself (``verl_checkpoint``)
        if wire_format != "named_tensors":
            raise ConfigError(
                f"checkpoint_engine with wire_format={wire_format!r} is not taken; this engine "
                f"makes deltas itself: use backend=naive, or backend={NAME} with encoding=delta"
            )
        if kwargs.get("peft_config") is not None and kwargs.get("base_sync_done"):
            raise ConfigError("adapters are not served by themselves: set model.lora.merge=True")
        if not self.is_leader_rank:
            await drain(weights)
            return
        try:
            await self._send(weights)
        finally:
            await drain(weights)  # the others are in the gathers that are left
        if global_steps is not None:
            await self._handle().set_global_steps.remote(global_steps)

    async def _send(self, weights: Any) -> None:
        if self._rollout is None:
            address, token = await self._handle().reached_at.remote()
            self._rollout = await asyncio.to_thread(Rollout.connect, address, token)
        if isinstance(weights, AsyncIterator):
            items = pulled(weights, asyncio.get_running_loop())
            await asyncio.to_thread(on_this_stream(partial(self._rollout.update_weights, items)))
        else:
            self._rollout.update_weights(weights)  # here, where the trainer's collectives belong

    def _handle(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server


def _nodes() -> list[Any]:
    return [node for node in ray.nodes() if node["Alive"]]


def _place(_: Any) -> tuple[str, list[str]]:
    """Of a worker of verl's: its node, and its GPUs as that node numbers them."""
    context = ray.get_runtime_context()
    resource = get_platform().ray_resource_name()
    return context.get_node_id(), context.get_accelerator_ids().get(resource, [])


def _sees(gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a server whose ranks take these GPUs: those of the replica's workers."""
    if not gpus:
        return {}
    platform = get_platform()
    kept = dict.fromkeys(platform.ray_noset_envvars(), "1")
    return {**kept, platform.visible_devices_envvar(): ",".join(gpus)}


_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.ServerAdapter"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
