"""Triton's interpreter, quicker: what it does for every operation anew is done once."""

from __future__ import annotations

import inspect
from typing import Any


def quicken() -> None:
    """Spare a launch most of what goes into neither numbers nor checks. Once for a process."""
    _patch_once()
    _call_at_once()
    _name_types_once()
    _make_shapes_once()
    _unwrap_what_is_wrapped()
    _leave_alike_as_it_is()
    _count_no_overflows()


def _patch_once() -> None:
    """The language is patched for a launch, and not for each function that its kernel calls; by
    what was found at the first launch.
    """
    from triton.runtime import interpreter

    patch, modules = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    of: dict[Any, frozenset[str]] = {}  # by function, the modules that it has the language from
    patched: set[str] = set()  # for the launch that runs
    # By what is patched already and what is to be: places, names, what is there before and then.
    changes: dict[Any, list[tuple[Any, str, Any, Any]]] = {}

    def patch_as_before(function: Any) -> Any:
        key = frozenset(patched), of[function]
        if key not in changes:
            scope = patch(function)
            changes[key] = [(*change, getattr(*change[:2])) for change in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for place, name, before, then in changes[key]:
            scope._changes.append((place, name, before))
            setattr(place, name, then)
        return scope

    def patch_once(function: Any) -> Any:
        if function not in of:
            known = filter(inspect.ismodule, function.__globals__.values())
            of[function] = frozenset(module.__name__ for module in known if module in modules)
        if of[function] <= patched:
            return interpreter._LangPatchScope()
        scope = patch_as_before(function)
        if not patched:  # the launch itself, which alone restores
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(of[function])
        return scope

    interpreter._patch_lang = patch_once


def _call_at_once() -> None:
    """What is called is the function itself, without a look at what it is always given."""
    from triton.runtime import interpreter

    checks = interpreter.tl.core.add.__code__  # that of all wrappers of ``builtin``

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is checks:
            member = member.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attr


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


def _unwrap_what_is_wrapped() -> None:
    """Most of what might be in a ``constexpr`` is of a type that never is; a type equals itself."""
    from triton.language import core

    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {int, bool, float, str, type(None), core.tensor, core.dtype, core.block_type}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def equals(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    core._unwrap_if_constexpr = unwrapped
    core.dtype.__eq__ = equals


def _leave_alike_as_it_is() -> None:
    """Two tensors of one type need no common one, nor a common shape where they share theirs."""
    from triton.language.core import tensor
    from triton.language.semantic import TritonSemantic

    check, broadcast = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
    )

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if not div_or_mod and type(lhs) is tensor and type(rhs) is tensor:
            scalar = lhs.type.scalar
            if scalar is rhs.type.scalar and not scalar.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        rest = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        return check(self, lhs, rhs, *rest)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = checked
    TritonSemantic.broadcast_impl_value = broadcasted


def _count_no_overflows() -> None:
    """Sums and products are computed a second time, in 64 bits, for an assertion that says nothing
    where ``debug`` is not set.
    """
    from triton.language.semantic import TritonSemantic

    look = TritonSemantic.binary_op_sanitize_overflow_impl

    def looked(self: Any, *of: Any) -> None:
        if self.builder.options.debug:
            look(self, *of)

    TritonSemantic.binary_op_sanitize_overflow_impl = looked
