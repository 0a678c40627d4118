"""The first layer here that computes what transformers' does not, and the kernel within it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from rollout import kernels
from rollout.api.diagnosing.layer_comparison import LayerComparison, Place, TrainerRun
from rollout.api.diagnosing.model_pair import plain_model, rebuilt_model
from rollout.errors import ConfigError
from rollout.kernels.op import watch_ops
from rollout.weight_sync.protocol.messages import WeightInfo


def find_layer(
    directory: Path,
    ids: Sequence[int],
    info: WeightInfo,
    settings: Mapping[str, Any],
    timeout: float,
) -> list[str]:
    """Lines on ``ids`` through the checkpoint in ``directory`` by both stacks, module by module.

    The engine's is built on this CPU with the ops that an engine of these ``settings`` (its
    ``layer_settings``) runs; what they replace in the config is replaced on both sides. Where one
    module differs by more than rounding, it is named, and the op whose plain-torch reference, in
    the place of its kernel, mends it. Not while an engine of this process runs: ops are watched.
    """
    try:
        plain = plain_model(directory, info.dtype, settings.get("hf_overrides"))
        ours = rebuilt_model(directory, info, plain, settings, timeout)
        comparison = LayerComparison(ours, TrainerRun(plain, [ids]), [ids])
        places = list(comparison.places())
    except ConfigError as error:
        return [f"layers: not compared: {error}"]
    except Exception as error:  # noqa: BLE001 - of transformers' code; what is known already counts
        return [f"layers: not compared: {type(error).__name__}: {error}"]
    first = next((place for place in places if place.differs), None)
    if first is None:
        return [f"layers: all {len(places)} modules agree with transformers' but for rounding"]
    times = first.difference / max(first.noise, 1e-20)
    told = f"layer: {first.kind} at {first.name} differs from transformers' by {times:.3g} x"
    lines = [f"{told} rounding"]
    if kernel := _kernel_of(comparison, first):
        lines.append(f"kernel: {kernel}, whose plain-torch reference in its place agrees")
    return lines


def _kernel_of(comparison: LayerComparison, place: Place) -> str | None:
    """The op that ``place`` differs by; None where no one of them mends it by itself."""
    called: dict[str, None] = {}

    def note(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        called[name] = None
        return run

    def again() -> Place:
        return next(one for one in comparison.places() if one.name == place.name)

    try:
        watch_ops(note)
        again()
        for name in called:
            watch_ops(partial(_by_reference, name))
            if not again().differs:
                return name
    finally:
        watch_ops(None)
    return None


def _by_reference(op: str, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, or of ``op`` its plain-torch reference."""
    return cast("Callable[..., Any]", getattr(kernels, op).reference) if name == op else run
