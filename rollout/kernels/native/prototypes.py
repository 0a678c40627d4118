"""C functions and structs as ctypes has them, read from the C sources: there is no second list."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}


def bind(library: ctypes.CDLL, name: str) -> Callable[..., Any]:
    """``rollout_<name>``; a call with another number of arguments than in C is a ``TypeError``."""
    found = re.search(rf"EXPORT (\w+) rollout_{name}\(([^)]*)\)", sources())
    assert found is not None, f"the C sources export no rollout_{name}"
    result, arguments = found.groups()
    types = [] if arguments == "void" else [_type(each) for each in arguments.split(",")]
    prototype = ctypes.CFUNCTYPE(_TYPES[result], *types)
    return prototype((f"rollout_{name}", library), tuple((1,) for _ in types))


@functools.cache
def structure(name: str) -> type[ctypes.Structure]:
    """``typedef struct {...} <name>``: pointers and scalars, in their order."""
    found = re.search(rf"typedef struct {{([^}}]*)}} {name};", sources())
    assert found is not None, f"the C sources have no struct {name}"
    fields = []
    for line in found[1].split(";"):
        first, *others = line.split(",")
        if declared := first.rsplit(maxsplit=1):
            kind, one = declared
            for field in (one, *others):
                fields.append((field.strip(" *\n"), _type(f"{kind} {field}")))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _type(declaration: str) -> Any:
    if "*" in declaration:
        return ctypes.c_void_p
    return _TYPES[declaration.replace("const ", "").split()[0]]


@functools.cache
def sources() -> str:
    """All of them, without comments."""
    text = "\n".join(path.read_text() for path in sorted(_HERE.glob("*.[ch]")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
