"""Native kernels for the wheel, where a C compiler is there; all else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = "rollout/kernels/native"


class BuildWithKernels(build_py):
    """Copies the package, then compiles its C sources beside them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # a checkout compiles for its own machine, at first use
        spec = importlib.util.spec_from_file_location("build", Path(NATIVE) / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            made = build.build_levels(Path(self.build_lib) / NATIVE / "built")
        except build.BuildError as error:
            self.warn(f"no native kernels in this build: {error}; they are compiled at first use")
        else:
            self.announce(f"native kernels for {[path.stem for path in made]}", level=2)


class PlatformWheel(bdist_wheel):
    """Of this platform and any Python 3: the kernels are loaded with ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithBinaries(Distribution):
    """Tells setuptools that the package is not Python alone."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=WithBinaries)
