"""Python runs this first wherever this folder is on its path: in tests, and in their processes."""

from pretended_cuda.install import install

install()
