"""Checkpoints whose linears are integers of 2, 4 or 8 bits packed in int32, scaled by group, as
GPTQ, AWQ and compressed-tensors (pack-quantized) write them: read as what they stand for.

Each says (code - zero) * scale. They differ in where a code lies: see ``_gptq``, ``_awq`` and
``_compressed``, which follow AutoGPTQ's, AutoAWQ's and compressed-tensors' own packing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import CASTABLE, Box, TensorMeta

if TYPE_CHECKING:
    from rollout.weights.files import Files

GPTQ, AWQ, COMPRESSED = "gptq", "awq", "compressed-tensors"
PACKED = "pack-quantized"  # the format of compressed-tensors that is read here
QWEIGHT, WEIGHT_PACKED = ".qweight", ".weight_packed"  # end the names of codes
# End the names of what scales inputs, outputs and attention's cache: these stay as they are.
ACTIVATIONS = tuple(
    f".{one}_{what}"
    for one in ("activation", "input", "output", "q", "k", "v")
    for what in ("scale", "zero_point")
)
BITS = (2, 4, 8)
_GPTQ_V2 = "gptq_v2"
_WORD = 32  # bits
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight codes of a word: where each lies
_BAND = 1 << 22  # elements that are unpacked at once: some int32 copies of them are alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Codes in a file, packed in int32 along ``axis``; ``places``: where in a word each lies;
    ``plus``: what each word is short of.
    """

    name: str
    bits: int
    axis: int
    places: tuple[int, ...]
    plus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A weight [N, K] of a file: all that it is made of, as names of tensors.

    ``turned``: the file has [K, N]. ``group``: inputs that share a scale, by their order or, where
    there is ``order`` (int32 [K]), as that says. ``zeros``: codes, plain int8 ones, or (None) the
    middle of the range; to them ``offset`` is added.
    """

    shape: tuple[int, int]
    turned: bool
    codes: Codes
    scales: str
    group: int
    order: str | None = None
    zeros: Codes | str | None = None
    offset: int = 0


class PackedIntFiles:
    """``X.qweight`` or ``X.weight_packed``, and what belongs to it, become ``X.weight`` [N, K] in
    float32, whose values are exact where scales have 16 bits; other tensors are passed on.

    ``directory`` has the ``config.json`` that says which form it is. A box reads the words, zeros
    and scales that it cuts. Raises ``ConfigError`` naming a tensor that is missing or misshapen.
    """

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        packed = quantization_config(directory / "config.json") or {}
        self._linears: dict[str, PackedLinear] = {}
        left_out: set[str] = set()
        for name in files.metadata():
            if not name.endswith((QWEIGHT, WEIGHT_PACKED)):
                continue
            stem = name.removesuffix(QWEIGHT).removesuffix(WEIGHT_PACKED)
            self._linears[f"{stem}.weight"] = _found(files, stem, packed)
            left_out |= {stem + end for end in _ENDINGS}
        floats = {n: TensorMeta(n, torch.float32, of.shape) for n, of in self._linears.items()}
        rest = {
            name: meta
            for name, meta in files.metadata().items()
            if name not in left_out and not name.endswith(ACTIVATIONS)
        }
        self._metadata = rest | floats

    def metadata(self) -> Mapping[str, TensorMeta]:
        return self._metadata

    def read(self, name: str, box: Box) -> Tensor:
        linear = self._linears.get(name)
        if linear is None:
            return self._files.read(name, box)
        within = Box(box.starts[::-1], box.stops[::-1]) if linear.turned else box
        out: Tensor | None = None  # where what is read lies
        (first, left), (last, right) = within.starts, within.stops
        step = max(1, _BAND // max(1, right - left) // _WORD) * _WORD
        for at in range(first // step * step, last, step):
            band = Box((max(at, first), left), (min(at + step, last), right))
            values = self._values(linear, band)
            out = values.new_empty(within.shape) if out is None else out
            out[band.starts[0] - first : band.stops[0] - first] = values
        out = torch.empty(within.shape) if out is None else out
        return out.T if linear.turned else out

    def close(self) -> None:
        self._files.close()

    def _values(self, linear: PackedLinear, box: Box) -> Tensor:
        """Of a box in the file's own coordinates, in float32."""
        along = 0 if linear.turned else 1  # the axis of inputs, whose groups share a scale
        start, stop = box.starts[along], box.stops[along]
        codes = self._codes(linear.codes, box)
        if linear.order is None:
            groups = torch.arange(start, stop, device=codes.device) // linear.group
        else:
            groups = self._files.read(linear.order, Box((start,), (stop,))).long()
        low, high = int(groups.min()), int(groups.max()) + 1
        cut = Box(*(_with(at, along, n) for at, n in ((box.starts, low), (box.stops, high))))
        scales = self._files.read(linear.scales, cut).float()
        if linear.zeros is None:
            centred = codes - (1 << linear.codes.bits - 1)
        else:
            held = linear.zeros
            zeros = (
                self._files.read(held, cut).int()
                if isinstance(held, str)
                else self._codes(held, cut)
            )
            centred = codes - (zeros + linear.offset).index_select(along, groups - low)
        return scales.index_select(along, groups - low).mul_(centred)

    def _codes(self, codes: Codes, box: Box) -> Tensor:
        """int32, of a box in the coordinates of what is not packed."""
        axis, per = codes.axis, _WORD // codes.bits
        start, stop = box.starts[axis], box.stops[axis]
        first, last = start // per, -(-stop // per)
        cut = Box(_with(box.starts, axis, first), _with(box.stops, axis, last))
        words = (self._files.read(codes.name, cut) + codes.plus).unsqueeze(axis + 1)
        shifts = torch.tensor(codes.places, dtype=torch.int32, device=words.device) * codes.bits
        shifts = shifts.view(-1, *(1,) * (1 - axis))
        found = (words >> shifts & (1 << codes.bits) - 1).flatten(axis, axis + 1)
        return found.narrow(axis, start - first * per, stop - start)


def is_packed_int(metadata: Mapping[str, TensorMeta]) -> bool:
    """Whether codes of such linears are among these."""
    return any(name.endswith((QWEIGHT, WEIGHT_PACKED)) for name in metadata)


def quantization_config(config: Path) -> Mapping[str, Any] | None:
    """What a ``config.json`` says of its files' codes, if there is one and it does.

    Raises ``ConfigError``, also where it rotates weights (``refuse_turned``).
    """
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config} cannot be read as JSON: {error}") from error
    packed = values.get("quantization_config") if isinstance(values, Mapping) else None
    if not isinstance(packed, Mapping):
        return None
    refuse_turned(packed, str(config))
    return packed


def refuse_turned(packed: Mapping[str, object], file: str) -> None:
    """``ConfigError`` where a ``quantization_config`` rotates weights, as QuIP and SpinQuant do."""
    turned = packed.get("transform_config")
    if isinstance(turned, Mapping) and turned.get("config_groups"):
        raise ConfigError(
            f"{file}: transform_config of compressed-tensors is not supported: it rotates "
            "activations, too; use a checkpoint without it"
        )


def is_packed_config(packed: Mapping[str, object]) -> bool:
    """Whether a ``quantization_config`` is of such files."""
    method = packed.get("quant_method")
    return method in (GPTQ, AWQ) or (method == COMPRESSED and packed.get("format") == PACKED)


_ENDINGS = (
    *(QWEIGHT, ".qzeros", ".scales", ".g_idx"),
    *(WEIGHT_PACKED, ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
)


def _found(files: Files, stem: str, packed: Mapping[str, Any]) -> PackedLinear:
    method = packed.get("quant_method")
    if is_packed_config(packed):
        read = {GPTQ: _gptq, AWQ: _awq}.get(str(method), _compressed)
        return read(files, stem, packed)
    raise ConfigError(
        f"{stem} is packed, and the config.json beside it says quant_method={method!r}, "
        f"format={packed.get('format')!r}: {GPTQ}, {AWQ} and {COMPRESSED} ({PACKED}) are read"
    )


def _gptq(files: Files, stem: str, packed: Mapping[str, Any]) -> PackedLinear:
    """``qweight`` [K / per, N] packed along the inputs, ``qzeros`` [groups, N / per] along the
    outputs and, but in ``checkpoint_format`` (or ``format``) gptq_v2, one too small; ``g_idx``
    [K], where groups go by activation order.

    GPTQModel takes that one of all codes from a word at once, so that a code of 0 borrows from the
    next: to the word it is given back.
    """
    packed = {**packed, **_own(packed.get("dynamic"), stem)}
    bits = _bits(stem, packed.get("bits"))
    form = str(packed.get("checkpoint_format") or packed.get("format") or GPTQ).lower()
    if form not in (GPTQ, _GPTQ_V2):
        raise ConfigError(
            f"{stem}: GPTQ in checkpoint_format {form!r} is not supported; use a checkpoint in "
            f"{GPTQ!r} or {_GPTQ_V2!r}"
        )
    per = _WORD // bits
    words, scales = _tensor(files, stem, QWEIGHT), _tensor(files, stem, ".scales")
    inputs, outputs = words.shape[0] * per, words.shape[1]
    group = _group(packed.get("group_size"), inputs)
    _check(scales, (-(-inputs // group), outputs))
    zeros = _tensor(files, stem, ".qzeros")
    _check(zeros, (scales.shape[0], -(-outputs // per)))
    order = files.metadata().get(f"{stem}.g_idx")
    in_order = tuple(range(per))
    ones = sum(1 << bits * at for at in in_order)
    return PackedLinear(
        shape=(outputs, inputs),
        turned=True,
        codes=Codes(name=words.name, bits=bits, axis=0, places=in_order),
        scales=scales.name,
        group=group,
        order=None if order is None or order.shape != (inputs,) else order.name,
        zeros=Codes(
            name=zeros.name,
            bits=bits,
            axis=1,
            places=in_order,
            plus=0 if form == _GPTQ_V2 else ones,
        ),
    )


def _own(dynamic: object, stem: str) -> dict[str, Any]:
    """What GPTQModel's ``dynamic`` says of one module: the first pattern that begins its name."""
    for pattern, said in dynamic.items() if isinstance(dynamic, Mapping) else ():
        try:
            found = re.match(pattern.removeprefix("+:"), stem)
        except re.error as error:
            raise ConfigError(
                f"the config.json's dynamic has {pattern!r}, no regular expression: {error}"
            ) from error
        if found and isinstance(said, Mapping):
            return dict(said)
    return {}


def _awq(files: Files, stem: str, packed: Mapping[str, Any]) -> PackedLinear:
    """``qweight`` [K, N / 8] and ``qzeros`` [groups, N / 8], both packed along the outputs, even
    ones of each eight first (version "gemm").
    """
    version = str(packed.get("version") or packed.get("format") or "gemm").lower()
    if packed.get("bits") != 4 or version != "gemm":
        raise ConfigError(
            f"{stem}: AWQ in {packed.get('bits')} bits, version {version!r}, is not supported; use "
            "a checkpoint in 4 bits, version 'gemm'"
        )
    words, scales = _tensor(files, stem, QWEIGHT), _tensor(files, stem, ".scales")
    inputs, outputs = words.shape[0], words.shape[1] * 8
    group = _group(packed.get("group_size"), inputs)
    _check(scales, (-(-inputs // group), outputs))
    zeros = _tensor(files, stem, ".qzeros")
    _check(zeros, (scales.shape[0], words.shape[1]))
    return PackedLinear(
        shape=(outputs, inputs),
        turned=True,
        codes=Codes(name=words.name, bits=4, axis=1, places=_AWQ_PLACES),
        scales=scales.name,
        group=group,
        zeros=Codes(name=zeros.name, bits=4, axis=1, places=_AWQ_PLACES),
    )


def _compressed(files: Files, stem: str, packed: Mapping[str, Any]) -> PackedLinear:
    """``weight_packed`` [N, K / per] packed along the inputs; ``weight_zero_point``, if any, packed
    along the outputs [N / per, groups] or (older files) plain int8 [N, groups]; codes and packed
    zeros are from 0 on, so zeros that are not packed, and none, lie in the middle.
    """
    words, scales = _tensor(files, stem, WEIGHT_PACKED), _tensor(files, stem, ".weight_scale")
    said = _tensor(files, stem, ".weight_shape")
    shape = tuple(files.read(said.name, Box.full(said.shape)).flatten().tolist())
    weights = _weights_of(packed, words, scales, shape)
    bits = _bits(stem, weights.get("num_bits"))
    per = _WORD // bits
    _check(words, (shape[0], -(-shape[1] // per)))
    group = _group(weights.get("group_size"), shape[1])
    order = files.metadata().get(f"{stem}.weight_g_idx")
    zeros: Codes | str | None = None
    offset = 0
    if (held := files.metadata().get(f"{stem}.weight_zero_point")) is not None:
        if held.dtype == torch.int32:
            _check(held, (-(-shape[0] // per), scales.shape[1]))
            zeros = Codes(name=held.name, bits=bits, axis=0, places=tuple(range(per)))
        else:
            _check(held, scales.shape)
            zeros, offset = held.name, 1 << bits - 1
    return PackedLinear(
        shape=(shape[0], shape[1]),
        turned=False,
        codes=Codes(name=words.name, bits=bits, axis=1, places=tuple(range(per))),
        scales=scales.name,
        group=group,
        order=None if order is None else order.name,
        zeros=zeros,
        offset=offset,
    )


def _weights_of(
    packed: Mapping[str, Any], words: TensorMeta, scales: TensorMeta, shape: tuple[int, ...]
) -> Mapping[str, Any]:
    """What a group of ``config_groups`` says of weights packed so; the first that fits both."""
    groups = packed.get("config_groups")
    for one in groups.values() if isinstance(groups, Mapping) else ():
        found = one.get("weights") if isinstance(one, Mapping) else None
        if not isinstance(found, Mapping) or found.get("num_bits") not in BITS or len(shape) != 2:
            continue
        rows, columns = shape
        cells = -(-columns // _group(found.get("group_size"), columns))
        if words.shape[1] == -(-columns * found["num_bits"] // _WORD) and (
            scales.shape == (rows, cells)
        ):
            return found
    raise ConfigError(
        "no group of the config.json's config_groups has weights of 2, 4 or 8 bits, by group or "
        f"channel, that fit {words.name} {list(words.shape)} and {scales.name} "
        f"{list(scales.shape)} of a weight {list(shape)}; use another checkpoint"
    )


def _tensor(files: Files, stem: str, end: str) -> TensorMeta:
    found = files.metadata().get(stem + end)
    wanted = CASTABLE if "scale" in end else {torch.int32, torch.int64}
    if found is None or found.dtype not in wanted:
        got = "is missing" if found is None else f"has dtype {found.dtype}"
        raise ConfigError(f"{stem} is packed, and {stem}{end} {got}; download the files again")
    return found


def _check(found: TensorMeta, shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise ConfigError(
            f"{found.name} has shape {list(found.shape)}, and the codes beside it need "
            f"{list(shape)}; download the files again"
        )


def _bits(stem: str, bits: object) -> int:
    if bits not in BITS:
        raise ConfigError(
            f"{stem}: codes of {bits} bits are not supported; use a checkpoint of 2, 4 or 8"
        )
    assert isinstance(bits, int)
    return bits


def _group(size: object, inputs: int) -> int:
    """Inputs that share a scale; -1 and None: all."""
    return size if isinstance(size, int) and size > 0 else max(1, inputs)


def _with(numbers: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*numbers[:axis], value, *numbers[axis + 1 :])
