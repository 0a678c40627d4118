"""Triton's interpreter, quicker: what it does for every operation anew is done once."""

from __future__ import annotations

import inspect
from typing import Any


def quicken() -> None:
    """Spare a launch most of what goes into neither numbers nor checks. Once for a process."""
    _patch_once()
    _name_types_once()
    _make_shapes_once()


def _patch_once() -> None:
    """The language is patched for a launch, and not for each function that its kernel calls."""
    from triton.runtime import interpreter

    patch, modules = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    of: dict[Any, frozenset[str]] = {}  # by function, the modules that it has the language from
    patched: set[str] = set()  # for the launch that runs

    def patch_once(function: Any) -> Any:
        if function not in of:
            known = filter(inspect.ismodule, function.__globals__.values())
            of[function] = frozenset(module.__name__ for module in known if module in modules)
        if of[function] <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:  # the launch itself, which alone restores
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(of[function])
        return scope

    interpreter._patch_lang = patch_once


def _name_types_once() -> None:
    """A type's equal in numpy is looked up in a table that is not made for it."""
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, {}

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = looked_up


def _make_shapes_once() -> None:
    """Tensors and their types of one shape share it: it took a third of the interpreter's time."""
    from triton.language import core

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}  # of types: it, elements, its text
    wrapped: dict[int, tuple[Any, Any, Any]] = {}  # of tensors, by that of their type, which stays

    def typed(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if key not in shapes or set(map(type, key)) != {int}:  # 16.0 equals 16, and is refused
            make_type(self, element_ty, shape)
            shapes[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = shapes[key]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        found = wrapped.get(id(shape))
        if found is None or found[0] is not shape:
            make_tensor(self, handle, type)
            wrapped[id(shape)] = shape, self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = found

    core.block_type.__init__, core.tensor.__init__ = typed, tensor
