"""What every layer that owns weights shares: declared parameters and the slots that fill them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.distributed.stage import Stage
from rollout.errors import ConfigError
from rollout.kernels import batch_invariant_linear, linear, quantized_linear
from rollout.kernels.native import use_huge_pages
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import SCALE, ParamSpec
from rollout.weights import PLAIN, Box, Layout, Shape, TileLayout, WeightSlot
from rollout.weights.names import weight_dtype
from rollout.weights.quantization import Scheme

LAYOUTS = ("plain", "tiles")
DETERMINISTIC_SIZES = (1, 2, 4)  # numbers of ranks that give one another's bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """How a model is built on one rank; ``layout`` is how linear weights lie in memory.

    ``expert_parallel``: ranks hold whole experts, instead of a part of each.
    ``deterministic``: linears run ``batch_invariant_linear``: no row depends on the batch, nor on
    how many of ``DETERMINISTIC_SIZES`` ranks there are.
    ``head_dtype``: of the logits, None for ``dtype``. ``quantization``: how linears are held.
    ``stage``: of a pipeline, whose layers alone are built.
    """

    config: ModelConfig
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    layout: str = "plain"
    expert_parallel: bool = False
    deterministic: bool = False
    head_dtype: torch.dtype | None = None
    quantization: Scheme | None = None
    stage: Stage = field(default_factory=Stage)

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"weight layout must be auto, plain or tiles, got {self.layout!r}")

    @property
    def alike(self) -> tuple[int, ...]:
        """The numbers of ranks that must give the bits that these do."""
        if not self.deterministic:
            return (self.tp.size,)
        return tuple(size for size in DETERMINISTIC_SIZES if self._divides_over(size))

    def _divides_over(self, size: int) -> bool:
        try:
            self.config.check_tensor_parallel(size, self.expert_parallel)
        except ConfigError:
            return False
        return True

    @property
    def linear_quantization(self) -> Scheme | None:
        """Of linears that are no experts."""
        scheme, moe = self.quantization, self.config.moe
        stacked = None if moe is None else moe.arch.stacked
        if scheme is None or (stacked is not None and stacked.alone_in == scheme.name):
            return None
        return scheme

    def linear_layout(self, *shapes: Shape, scheme: Scheme | None = None) -> Layout:
        """The layout of a linear weight ``[outputs, inputs]``, of its codes where it is quantised:
        tiles where they divide it, but for four bits, which no kernel reads so.

        ``shapes``: its own, and those that it has on other numbers of ranks and that must lie
        alike, as their products are summed in another order.
        """
        tiles = TileLayout() if scheme is None else TileLayout(inputs=4)
        divides = all(s[0] % tiles.rows == 0 and s[1] % tiles.inputs == 0 for s in shapes)
        known = scheme is None or scheme.codes in ("int8", "e4m3")
        return tiles if self.layout == "tiles" and divides and known else PLAIN


class Adapters(Protocol):
    """What may lie beside a linear; see ``adapters.instance.BesideLinear``."""

    @property
    def is_idle(self) -> bool: ...

    def add(self, y: Tensor, x: Tensor) -> Tensor: ...

    def scale(self, y: Tensor, bias: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class StandsFor(Protocol):
    """Stands where another stage has the module ``away``; see ``decoder.absent``."""

    @property
    def away(self) -> nn.Module: ...


class Layer(nn.Module):
    """A module that declares its logical parameters; parameters never take gradients.

    ``adapters``: what is added to the product of its ``weight``.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.adapters: Adapters | None = None
        self.build = build
        self.specs: dict[str, ParamSpec] = {}

    def declare(
        self, name: str, shape: Shape, layout: Layout = PLAIN, padding: tuple[Box, ...] = ()
    ) -> None:
        """Own the logical parameter ``name``: uninitialised storage, its padding zeroed."""
        self.specs[name] = ParamSpec(shape, layout, padding)
        storage = torch.empty(
            layout.storage_shape(shape),
            dtype=weight_dtype(name, self.build.dtype),
            device=self.build.device,
        )
        use_huge_pages(storage)
        self.register_parameter(name, nn.Parameter(storage, requires_grad=False))
        self.zero_padding()

    def declare_linear(self, shape: Shape, *others: Shape) -> None:
        """Own the ``weight`` [outputs, inputs] of a linear, quantised where that is asked for.

        ``others``: as of ``Build.linear_layout``.
        """
        scheme = self.build.linear_quantization
        layout = self.build.linear_layout(shape, *others, scheme=scheme)
        if scheme is None:
            self.declare("weight", shape, layout)
        else:
            self.declare_quantized("weight", shape, layout, scheme)

    def declare_quantized(self, name: str, shape: Shape, layout: Layout, scheme: Scheme) -> None:
        """Own the codes of ``name``, a part that cuts no cell, and their scales beside them."""
        self.specs[name] = ParamSpec(shape, layout, scheme=scheme)
        stored = (*shape[:-1], shape[-1] // scheme.per_byte)
        scales = (*shape[:-1], scheme.cells(shape[-2:]))
        for part, size, dtype in (
            (name, layout.storage_shape(stored), scheme.storage_dtype),
            (f"{name}{SCALE}", scales, scheme.scale_dtype),
        ):
            storage = torch.empty(size, dtype=dtype, device=self.build.device)
            use_huge_pages(storage)
            self.register_parameter(part, nn.Parameter(storage, requires_grad=False))

    def zero_padding(self) -> None:
        """Write the zeros that ``padding`` promises; no source ever writes there."""
        for name, spec in self.specs.items():
            if not spec.padding:
                continue
            storage = getattr(self, name).data
            for box in spec.padding:
                if not storage.is_meta:
                    zeros = torch.zeros(box.shape, dtype=storage.dtype, device=storage.device)
                    spec.layout.write(storage, spec.shape, box, zeros)

    def matmul(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        """``x @ weight^T + bias`` and what adapters add, whatever the weight's layout.

        ``gated``: of quantised ones alone, where no row has an adapter.
        """
        y = self._product(x, bias, gated)
        return self.adapted(y, x, bias)

    def adapted(self, y: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``y``, which was made of ``x`` and has ``bias`` in it, as adapters have it, in place."""
        if self.adapters is None or self.adapters.is_idle:
            return y
        return self.adapters.scale(self.adapters.add(y, x), bias)

    @property
    def is_adapted(self) -> bool:
        """Whether a row of this step has an adapter."""
        return self.adapters is not None and not self.adapters.is_idle

    def _product(self, x: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
        spec = self.specs["weight"]
        rows, columns = spec.shape
        if spec.scheme is not None:
            codes, scales = storage_of(self, "weight"), storage_of(self, f"weight{SCALE}")
            return quantized_linear(
                x, codes, scales, bias, spec.layout, (rows, columns), spec.scheme, gated
            )
        run = batch_invariant_linear if self.build.deterministic else linear
        return run(x, storage_of(self, "weight"), bias, spec.layout, (rows, columns))

    def slots(self, prefix: str) -> list[WeightSlot]:
        """Every slot that fills this layer, whose module name is ``prefix``."""
        raise NotImplementedError(f"{type(self).__name__} must declare its slots")

    def after_load(self) -> None:
        """Re-derive, in place, whatever was computed from the parameters."""
        self.zero_padding()


def rows_slot(source: str, shape: Shape, start: int, count: int, param: str, at: int) -> WeightSlot:
    """Rows ``start..start+count`` of a 1-D or 2-D source land at row ``at`` of ``param``."""
    rest = shape[1:]
    zeros = (0,) * len(rest)
    take = Box((start, *zeros), (start + count, *rest))
    return WeightSlot(source, shape, take, param, Box((at, *zeros), (at + count, *rest)))


def whole_slot(source: str, shape: Shape, param: str) -> WeightSlot:
    """All of ``source`` lands in all of ``param``: a replicated parameter."""
    return WeightSlot(source, shape, Box.full(shape), param, Box.full(shape))


def sibling(prefix: str, name: str) -> str:
    """The module ``name`` beside the module ``prefix``."""
    parent, _, _ = prefix.rpartition(".")
    return f"{parent}.{name}" if parent else name


def storage_of(layer: nn.Module, name: str) -> Tensor:
    """The memory of a declared parameter."""
    storage = getattr(layer, name)
    assert isinstance(storage, Tensor)
    return storage.data
