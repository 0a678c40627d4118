"""A model from its configuration: the class or declaration that its architecture names, built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rollout.distributed import TensorParallel
from rollout.distributed.stage import Stage
from rollout.errors import ConfigError
from rollout.kernels.linear import reads_tiles
from rollout.models.adapters.slots import AdapterSlots
from rollout.models.arch import Arch
from rollout.models.causal_lm import CausalLM
from rollout.models.config.model import ModelConfig
from rollout.models.config.stage_layers import stage_layers
from rollout.models.determinism import check_deterministic
from rollout.models.foreign import ForeignCausalLM
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.registry import Registry
from rollout.models.transformers_lm import TransformersCausalLM
from rollout.models.vision_lm import VisionCausalLM
from rollout.models.weight_io.table import WeightTable
from rollout.weights import TensorMeta
from rollout.weights.quantization import SCHEMES


def build_model(
    config: ModelConfig,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device | str,
    layout: str = "plain",
    *,
    max_model_len: int | None = None,
    expert_parallel: bool = False,
    deterministic: bool = False,
    head_dtype: torch.dtype | None = None,
    quantization: str = "none",
    registry: Registry | None = None,
    tensors: Callable[[], Sequence[TensorMeta]] = tuple,
    stage: Stage | None = None,
) -> Model:
    """One rank's model with uninitialised parameters on ``device`` (``meta`` takes no memory).

    ``layout`` plain | tiles | auto (tiles where a native kernel reads them). ``max_model_len``
    (default: the config's) sizes the rope table and settles length-dependent rope kinds; see
    ``Rotary``. ``expert_parallel`` deals out whole experts to the ranks. ``deterministic`` makes a
    row of logits independent of the rows beside it, bit by bit. ``head_dtype``: of the logits, None
    for ``dtype``. ``quantization``: how linears are held, "none" or a scheme. ``tensors`` says what
    the checkpoint holds; it is asked for a class from elsewhere alone (``foreign.py``). ``stage``:
    whose layers alone are built. Raises ``ConfigError``.
    """
    if layout == "auto":
        layout = "tiles" if reads_tiles(torch.device(device), dtype) else "plain"
    build = Build(
        config=config,
        tp=tp,
        dtype=dtype,
        device=torch.device(device),
        layout=layout,
        expert_parallel=expert_parallel,
        deterministic=deterministic,
        head_dtype=head_dtype,
        quantization=SCHEMES.get(quantization),
        stage=stage or Stage(),
    )
    check_stages(config, build.stage.count)
    max_len = max_model_len or config.max_position_embeddings
    if config.hf_values is not None:
        return _by_transformers(build, max_len)
    check_quantization(build)
    if config.modules:
        raise ConfigError(
            f"MODULE_MAP: {config.architecture} runs natively, and modules of transformers' models "
            f"alone are replaced, not {next(iter(config.modules))}; map the architecture itself"
        )
    kind = (registry or Registry()).load(config.architecture)
    if isinstance(kind, Arch):
        kind = CausalLM if config.vision is None else VisionCausalLM
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"{kind!r} is not a model class: register a torch.nn.Module")
    if not issubclass(kind, CausalLM):
        if build.stage.count > 1:
            raise ConfigError(
                f"pipeline_parallel_size={build.stage.count} does not reach {kind.__name__}, a "
                "model class from elsewhere: leave it out"
            )
        _check_foreign(kind, build, quantization)
        return ForeignCausalLM(build, max_len, kind, tensors())
    if deterministic:
        check_deterministic(build)
    return kind(build, max_len)


def _check_foreign(kind: type[nn.Module], build: Build, quantization: str) -> None:
    """Raise ``ConfigError`` for what a model class from elsewhere cannot be told."""
    beyond = f"does not reach {kind.__name__}, a model class from elsewhere: leave it"
    if build.quantization is not None:
        raise ConfigError(f"quantization={quantization!r} {beyond} out")
    if build.head_dtype not in (None, build.dtype):
        raise ConfigError(f"head_dtype={build.head_dtype} {beyond} at auto")
    if build.deterministic:
        check_deterministic(build, kind)


def slots_beside(
    model: Model, count: int, rank: int, *, vocabulary: bool, experts: bool, paged: bool = False
) -> AdapterSlots:
    """``count`` empty slots for adapters of at most ``rank``, of embedding and head, too, where
    ``vocabulary``, of routed experts where ``experts``; ``paged``: see ``AdapterSlots``.
    ``ConfigError`` where none can be.
    """
    if not isinstance(model.policy, CausalLM):
        raise ConfigError(
            f"max_adapters: {model.config.architecture} runs by modules that are not rollout's "
            "own; leave it out and load adapters merged"
        )
    try:
        return AdapterSlots(model, count, rank, vocabulary, experts, paged)
    except RuntimeError as error:
        raise ConfigError(
            f"no memory for the slots of max_adapters={count} of max_lora_rank={rank}: lower "
            f"either ({error})"
        ) from error


def check_kv_codes(model: Model, name: str) -> None:
    """``ConfigError`` where a model cannot have keys and values as the codes of that name: whose
    modules read pages themselves, or keep what they need in caches of their own.
    """
    config = model.config
    by_interface = config.hf_values is not None and config.kept is None
    if name != "auto" and not by_interface and not isinstance(model.policy, CausalLM):
        raise ConfigError(
            f"kv_cache_dtype={name!r}: {config.architecture} attends by modules that are not "
            "rollout's own, and keep keys and values of the model's dtype alone; leave it at auto"
        )


def check_quantization(build: Build) -> None:
    """Raise a ``ConfigError`` for what quantised weights do not go with."""
    if build.quantization is None:
        return
    if build.deterministic:
        name = build.quantization.name
        raise ConfigError(
            f"quantization={name!r} does not go with deterministic=True yet: leave one out"
        )


def check_stages(config: ModelConfig, count: int) -> None:
    """``ConfigError`` where a model cannot be cut into so many stages of a pipeline."""
    if count == 1:
        return
    what = f"pipeline_parallel_size={count}"
    if count > config.num_layers:
        raise ConfigError(
            f"{what}: {config.architecture} has {config.num_layers} layers, and each stage needs "
            "one; use fewer stages"
        )
    reasons = {
        "runs by modules that are not rollout's own": config.hf_values is not None,
        "has an index of tokens that layers share": bool(config.indexed_layers),
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        raise ConfigError(
            f"{what}: {config.architecture} {found[0]}; use tensor_parallel_size alone"
        )
    vision, first = config.vision, stage_layers(config, Stage(0, count))
    if vision is not None and vision.levels > len(first):
        raise ConfigError(
            f"{what}: the first {vision.levels} layers of {config.architecture} are told what is "
            f"seen, and the first stage has {len(first)}; use fewer stages"
        )


def _by_transformers(build: Build, max_len: int) -> Model:
    asked = {
        "deterministic": build.deterministic,
        "head_dtype": build.head_dtype not in (None, build.dtype),
        "expert_parallel": build.expert_parallel,
        "quantization": build.quantization is not None,
    }
    if refused := [name for name, is_so in asked.items() if is_so]:
        raise ConfigError(
            f"{build.config.architecture} runs as transformers' modules, without {refused[0]}"
        )
    return TransformersCausalLM(build, max_len)


def build_tables(
    config: ModelConfig,
    tp_size: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "plain",
    *,
    stages: int = 1,
    max_model_len: int | None = None,
    expert_parallel: bool = False,
    deterministic: bool = False,
    quantization: str = "none",
    registry: Registry | None = None,
    tensors: Callable[[], Sequence[TensorMeta]] = tuple,
) -> list[WeightTable]:
    """Every rank's weight table, from models on ``meta``: no memory, no process group.

    ``stages`` of ``tp_size`` ranks each, stage by stage.
    """
    return [
        build_model(
            config,
            TensorParallel(rank, tp_size),
            dtype,
            "meta",
            layout,
            max_model_len=max_model_len,
            expert_parallel=expert_parallel,
            deterministic=deterministic,
            quantization=quantization,
            registry=registry,
            tensors=tensors,
            stage=Stage(index, stages),
        ).table
        for index in range(stages)
        for rank in range(tp_size)
    ]
