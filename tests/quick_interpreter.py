"""Triton's interpreter, quicker: its language is patched once for a launch."""

from __future__ import annotations

import inspect
from typing import Any


def quicken() -> None:
    """Spare the functions that a kernel calls from patching the language each time anew, by which
    most of the interpreter's time goes.
    """
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
