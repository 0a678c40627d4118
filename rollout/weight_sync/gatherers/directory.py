"""A checkpoint directory, read by the caller tensor by tensor and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout import wire
from rollout.errors import SourceFailed
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.names import bind_stream, wire_dtype
from rollout.weights import Box, TensorMeta

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class DirectorySource:
    """``*.safetensors`` of a directory, else its ``*.bin`` (weights only, no pickled code).

    One tensor is in memory at a time; files are mapped, not read whole. The directory must not
    change during the update.
    """

    def __init__(
        self,
        path: Path,
        aliases: Mapping[str, str],
        dtype: torch.dtype | None,
        agreement: Agreement,
    ) -> None:
        self.agreement = agreement
        self._aliases, self._dtype = aliases, dtype
        self._files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
        self._path = path
        if not self._files:
            raise SourceFailed(f"{path} holds no *.safetensors and no *.bin file")
        stand_ins = ((n, torch.empty(s, dtype=d, device="meta")) for n, d, s in self._describe())
        self._metadata = tuple(
            TensorMeta(name, wire_dtype(t.dtype, dtype), tuple(t.shape))
            for name, t in bind_stream(stand_ins, aliases)
        )
        if not self._metadata:
            raise SourceFailed(f"{path} holds no tensor; nothing can be sent")

    def metadata(self) -> tuple[TensorMeta, ...]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in bind_stream(self._read(), self._aliases):
            yield name, tensor.to(wire_dtype(tensor.dtype, self._dtype))

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(meta.name, [Box.full(meta.shape)]) for meta in self._metadata]

    def _describe(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) in file order, from the headers."""
        for file in self._files:
            if file.suffix == ".bin":
                for name, tensor in _bin(file).items():
                    yield name, tensor.dtype, tuple(tensor.shape)
                continue
            with _open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    dtype = _SAFETENSORS_DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise SourceFailed(f"{file}: {name} has dtype {part.get_dtype()}")
                    yield name, dtype, tuple(part.get_shape())

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        for file in self._files:
            if file.suffix == ".bin":
                yield from _bin(file).items()
                continue
            with _open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)


def _open(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise SourceFailed(f"{file} cannot be read: {error}") from error


def _bin(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError) as error:
        raise SourceFailed(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SourceFailed(f"{file} holds a {type(found).__name__}, not a state dict")
    kept = {str(k): v for k, v in found.items() if isinstance(v, Tensor)}
    for name, tensor in kept.items():
        wire.dtype_name(tensor.dtype)
        if tensor.is_sparse:
            raise SourceFailed(f"{file}: {name} is sparse; a source holds dense tensors")
    return kept
