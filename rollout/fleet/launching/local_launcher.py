"""Engines as processes beside the front, on loopback."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rollout.errors import ConfigError, EngineOverloaded
from rollout.fleet.launching.engine_process import EngineProcess
from rollout.fleet.launching.replicas import End


class LocalLauncher:
    """``rollout serve WORDS``, reached with a token of their own."""

    def __init__(
        self, words: Sequence[str], gpus: Sequence[Sequence[str]] = (), journal: Path | None = None
    ) -> None:
        """``gpus``: those that each engine sees, as CUDA_VISIBLE_DEVICES names them, its own first;
        () is on CPUs.
        ``journal``: a directory, in which each engine has one of its name.
        """
        self._words, self._journal = list(words), journal
        self._free = [",".join(each) for each in gpus] if gpus else None
        self._lock = threading.Lock()
        self._token = secrets.token_hex(16)

    def launch(self, name: str) -> LocalReplica:
        settings = {"ROLLOUT_TOKEN": self._token}
        gpus = self._take()
        if gpus is not None:
            settings["CUDA_VISIBLE_DEVICES"] = gpus
        try:
            process = EngineProcess(name, [*self._words, *self._own_words(name)], settings)
        except OSError:
            self._give_back(gpus)
            raise
        return LocalReplica(process, self._token, lambda: self._give_back(gpus))

    def _own_words(self, name: str) -> list[str]:
        """A journal has one writer, which forgets what is oldest."""
        return [] if self._journal is None else ["--journal", str(self._journal / name)]

    def _take(self) -> str | None:
        if self._free is None:
            return None
        with self._lock:
            if not self._free:
                raise EngineOverloaded("all GPUs are taken, by an engine that has yet to end")
            return self._free.pop(0)

    def _give_back(self, gpus: str | None) -> None:
        if gpus is not None and self._free is not None:
            with self._lock:
                self._free.append(gpus)


class LocalReplica:
    """One such engine. ``given_back`` is called once it has ended."""

    waits_for = ""

    def __init__(self, process: EngineProcess, token: str, given_back: Callable[[], None]) -> None:
        self.token = token
        self._process, self._given_back = process, given_back
        self._lock = threading.Lock()

    @property
    def http(self) -> str:
        return self._process.http

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> str:
        return self._process.ready()

    def wait(self) -> End:
        return End(why=f"its process has ended with status {self._process.wait()}")

    def end(self) -> None:
        self._process.end()
        with self._lock:
            given_back, self._given_back = self._given_back, lambda: None
        given_back()


def gpus_each(visible: Sequence[str], count: int, ranks: int) -> list[list[str]]:
    """The ``visible`` GPUs in the order in which each of ``count`` replicas sees them: its own come
    first, one for each of its ``ranks``; on the others it maps a trainer's memory. ``ConfigError``
    where they do not suffice.
    """
    if len(visible) < count * ranks:
        raise ConfigError(
            f"{count} replicas of {ranks} ranks need {count * ranks} GPUs, and {len(visible)} are "
            "visible: start fewer, or engines of your own and `rollout fleet` over them"
        )
    own = [list(visible[n * ranks : (n + 1) * ranks]) for n in range(count)]
    return [[*mine, *(gpu for gpu in visible if gpu not in mine)] for mine in own]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, or would."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]


def threads_each(replicas: int, ranks: int) -> int:
    """Of the processors that this process may use, an equal share for each replica's ranks."""
    return max(1, len(os.sched_getaffinity(0)) // (replicas * ranks))
