"""TRL's stock ``GRPOTrainer(vllm_mode="colocate")`` over this engine, in the trainer's processes.

    from rollout.integrations.trl_colocate import colocate
    colocate(num_kv_blocks=1024)
    GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate")).train()

``LLM`` is what TRL 1.16 uses of ``vllm.LLM``, and no more. TRL hands weights over one by one and
ends with ``reset_prefix_cache``: that is one update, committed there or not at all.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rollout.api import Rollout
from rollout.config import DEFAULT_TIMEOUT
from rollout.distributed.native_thread import on_this_stream
from rollout.errors import ConfigError, InvalidRequest
from rollout.generation import Completion, RequestOutput, SamplingParams
from rollout.weight_sync.protocol.receipts import UpdateReceipt

_LOOK = 0.2  # seconds between looks at whether the update has ended
_PUSH = 600.0  # seconds that a trainer may take for its next tensor
_BUFFER = ".e_score_correction_bias"  # of routers
Item = tuple[str, Tensor]


def colocate(**engine_config: Any) -> None:
    """Have TRL's colocate mode take this engine for vLLM's; before the trainer is made.

    ``engine_config``: fields of ``EngineConfig``, which come after what TRL says. vLLM need not be
    installed; where it is, it is not used.
    """
    from trl.generation import vllm_generation

    def start(**said: Any) -> LLM:
        return LLM(**said, engine_config=engine_config)

    generation = vllm_generation.VLLMGeneration
    if not hasattr(generation, "_iter_parameters"):  # else this was called before
        generation._iter_parameters = generation._iter_named_params
        generation._iter_named_params = _parameters_and_buffers
    vllm_generation.LLM = start
    vllm_generation.SamplingParams = _params
    vllm_generation.StructuredOutputsParams = dict
    vllm_generation.is_vllm_available = lambda *_: True


class LLM:
    """One engine of ``tensor_parallel_size`` neighbouring ranks of the job, as TRL lays them out.

    With one it is this process's own; with more each of them is a rank of it, and every method is
    collective over them, as TRL calls it. ``receipts``: of each sync.
    """

    def __init__(
        self,
        *,
        model: str,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 4096,
        seed: int = 0,
        quantization: str | None = None,
        trust_remote_code: bool = False,
        engine_config: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """What is vLLM's own (``gpu_memory_utilization``, ``model_impl`` ...) is passed over."""
        if quantization is not None:
            raise ConfigError(f"quantization={quantization!r} is not served: use bfloat16 weights")
        settings = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            **(engine_config or {}),
        }
        self.rollout: Any
        self.rollout, limit = _started(model, tensor_parallel_size, settings)
        self.receipts: list[UpdateReceipt] = []
        self._update: _Update | None = None
        self.llm_engine = _tree(self.load_weights, limit)

    def load_weights(self, items: Sequence[Item]) -> None:
        """The next tensors of an update; the first ones begin it.

        Each has been read when this returns. A failure is kept until ``reset_prefix_cache``, so
        that no rank leaves the trainer's gathers alone.
        """
        if self._update is None:
            self._update = _Update(self.rollout)
        for item in items:
            self._update.push(item)

    def reset_prefix_cache(self) -> bool:
        """The end of an update: commits, or raises why not, and the old version serves on."""
        if self._update is None:
            self.rollout.reset_prefix_cache()
            return True
        update, self._update = self._update, None
        self.receipts.append(update.finish())
        return True

    def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **_: Any,
    ) -> list[Any]:
        """vLLM's outputs for ``{"prompt_token_ids": [...]}``; logprobs are those of the
        distribution that was sampled (of the likeliest others the model's own).
        """
        if self._update is not None:
            raise InvalidRequest("an update is under way: reset_prefix_cache() ends it")
        for prompt in prompts:
            if set(prompt) != {"prompt_token_ids"}:
                raise InvalidRequest(f"this engine takes token ids alone, not {sorted(prompt)}")
        ids = [list(prompt["prompt_token_ids"]) for prompt in prompts]
        wanted = sampling_params is not None and sampling_params.logprobs is not None
        return [_output(output, wanted) for output in self.rollout.generate(ids, sampling_params)]

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        self.rollout.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.rollout.wake_up(tags)


class _Update:
    """An update that is pushed: ``update_weights``, in a thread, reads what ``push`` is given."""

    def __init__(self, rollout: Any) -> None:
        self._items: queue.Queue[Item | None] = queue.Queue(1)
        self._taken = threading.Semaphore(0)
        self._receipt: UpdateReceipt | None = None
        self._failure: BaseException | None = None
        run = on_this_stream(partial(self._run, rollout))
        self._thread = threading.Thread(target=run, name="rollout-pushed-update", daemon=True)
        self._thread.start()

    def push(self, item: Item) -> None:
        """Returns when the tensor has been read, or the update has ended before its end."""
        while self._thread.is_alive():
            try:
                self._items.put(item, timeout=_LOOK)
                break
            except queue.Full:
                continue
        while self._thread.is_alive() and not self._taken.acquire(timeout=_LOOK):
            pass

    def finish(self) -> UpdateReceipt:
        while self._thread.is_alive():
            try:
                self._items.put(None, timeout=_LOOK)
                break
            except queue.Full:
                continue
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._receipt is not None
        return self._receipt

    def _run(self, rollout: Any) -> None:
        try:
            self._receipt = rollout.update_weights(self._pushed(), timeout=DEFAULT_TIMEOUT)
        except BaseException as error:  # noqa: BLE001 - it is raised where the update ends
            self._failure = error

    def _pushed(self) -> Iterator[Item]:
        while (item := self._items.get(timeout=_PUSH)) is not None:
            yield item
            self._taken.release()


def _started(model: str, size: int, settings: dict[str, Any]) -> tuple[Any, int]:
    """The engine, and its ``max_model_len``."""
    given = {name: value for name, value in settings.items() if value is not None}
    if size == 1:
        alone = Rollout(model, **given)
        return alone, alone.server_info().max_model_len
    dist: Any = torch.distributed
    blocks = [list(range(at, at + size)) for at in range(0, dist.get_world_size(), size)]
    group, _ = dist.new_subgroups_by_enumeration(blocks)
    together = Rollout.from_ranks(model, group, **given)
    limit = [together.engine.server_info().max_model_len if together.engine else 0]
    dist.broadcast_object_list(limit, src=dist.get_process_group_ranks(group)[0], group=group)
    return together, limit[0]


def _tree(load_weights: Any, max_model_len: int) -> Any:
    """``llm.llm_engine``, down the one path to the model that TRL goes."""
    runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    config = SimpleNamespace(max_model_len=max_model_len)
    return SimpleNamespace(model_executor=executor, model_config=config)


def _parameters_and_buffers(generation: Any) -> Iterator[Item]:
    """TRL goes over parameters alone; what is a buffer to transformers makes the model whole."""
    yield from generation._iter_parameters()
    for name, buffer in generation.model.named_buffers():
        if name.endswith(_BUFFER) and "original_module" not in name:
            yield generation._fix_param_name_to_vllm(name, ["modules_to_save.default."]), buffer


def _params(**said: Any) -> SamplingParams:
    return SamplingParams.from_dict(said)


def _output(output: RequestOutput, wanted: bool) -> Any:
    samples = [
        SimpleNamespace(
            index=sample.index,
            text=sample.text,
            token_ids=sample.token_ids,
            logprobs=_logprobs(sample) if wanted else None,
            finish_reason=sample.finish_reason,
        )
        for sample in output.outputs
    ]
    return SimpleNamespace(
        request_id=output.request_id, prompt_token_ids=output.prompt_token_ids, outputs=samples
    )


def _logprobs(sample: Completion) -> list[dict[int, Any]]:
    """By position: the likeliest tokens, and the sampled one, each with its rank."""
    found = []
    tops = sample.logprobs.top or [{}] * len(sample.token_ids)
    for token, own, top in zip(sample.token_ids, sample.logprobs.processed, tops, strict=True):
        ranked = sorted({token: own, **top}.items(), key=lambda pair: -pair[1])
        values = {**dict(ranked), token: own}
        found.append(
            {
                id_: SimpleNamespace(logprob=values[id_], rank=place, decoded_token=None)
                for place, (id_, _) in enumerate(ranked, 1)
            }
        )
    return found
