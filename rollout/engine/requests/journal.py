"""A journal of finished requests: all that running one again needs, in files of bounded size.

A line is the CRC-32 of a JSON document in hexadecimal, a space, the document and a newline. A file
begins with the engine's facts, and has the digests of a version before the first request that was
computed by it, so that each file can be read alone and the oldest may go. What a crash has cut off
fails its CRC and is passed over.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, cast
from zlib import crc32

import msgspec

from rollout.distributed.native_thread import NativeThread
from rollout.errors import ConfigError
from rollout.generation import Completion, RequestOutput, SamplingParams, VersionSpan

MAX_WAITING = 4096  # requests that wait to be written; more are dropped, and counted
KEPT_VERSIONS = 64  # whose digests later files may name
FILES = 8  # that the bound of bytes is divided into
MIN_BYTES = 1 << 20
_CLOSE_WAIT = 10.0  # seconds
_SUFFIX = ".journal"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended. ``output`` makes its ``RequestOutput``, in any thread."""

    output: Any  # a ``Snapshot``
    params: SamplingParams
    seeds: tuple[int, ...]  # of its samples
    images: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledRequest:
    """A request as the journal has it.

    ``seeds``: the one of each sample, drawn or derived. ``facts``: the engine's. ``digests``: of
    each version of its spans that was known, by tensor. ``adapter``: name@version of the one that
    answered, or ""; ``adapter_digest``: that of its factors and scalings, where it is known.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seeds: list[int]
    samples: list[JournaledSample]
    images: int
    finished: float  # seconds since the epoch of Unix
    facts: Mapping[str, Any]
    digests: Mapping[int, Mapping[str, int]]
    adapter: str = ""
    adapter_digest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledSample:
    """``logprobs`` are raw ones; spans as in ``Completion``."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    weight_versions: tuple[VersionSpan, ...]
    kv_spans: tuple[VersionSpan, ...]


class Journal:
    """Written by a thread of its own, behind a queue that nobody waits for.

    ``dropped``: requests that found the queue full, or that could not be written; the file says how
    many, too, where they are missing.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """``ConfigError`` where the directory cannot be written."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"journal: {directory} cannot be written: {error}") from error
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"journal_bytes must be at least {MIN_BYTES}, got {max_bytes}")
        self.dropped = self.written = 0
        self._directory, self._max_bytes = directory, max_bytes
        self._facts: Mapping[str, Any] = {}
        self._told = 0  # of the dropped
        self._versions: OrderedDict[int, Mapping[str, int]] = OrderedDict()
        self._adapters: OrderedDict[str, int] = OrderedDict()  # name@version -> its digest
        self._in_file: set[int] = set()
        self._file: int | None = None
        self._size = self._number = 0
        self._name = ""
        self._queue: Queue[Finished | None] = Queue(MAX_WAITING)
        self._closing = False
        self._thread = NativeThread("rollout-journal", self._run, self._tell_to_end)

    def start(self, facts: Mapping[str, Any]) -> None:
        """``facts``: JSON-able, of the engine."""
        self._facts = facts
        # Above what is there, also where the clock was set back meanwhile, or is another host's:
        # else these files would be the first to go.
        there = (path.name.partition("-")[0] for path in journal_files(self._directory))
        above = 1 + max((int(begun) for begun in there if begun.isdecimal()), default=0)
        self._name = f"{max(time.time_ns(), above):020d}-{os.getpid()}"
        self._thread.start()

    def add(self, finished: Finished) -> None:
        """From the engine's thread: never waits."""
        try:
            self._queue.put_nowait(finished)
        except Full:
            self.dropped += 1

    def version(
        self, version: int, digests: Mapping[str, int], adapters: Mapping[str, int] | None = None
    ) -> None:
        """The digests of a version, by tensor (none: they are those of the one before), and of
        adapters, by name@version; before its first request.
        """
        for name, digest in (adapters or {}).items():
            self._adapters[name] = digest
            self._adapters.move_to_end(name)  # what is live now is forgotten last
        while len(self._adapters) > max(KEPT_VERSIONS, len(adapters or {})):
            self._adapters.popitem(last=False)
        last = next(reversed(self._versions.values()), {})
        # A commit of adapters alone leaves them.
        self._versions[version] = last if not digests or last == digests else dict(digests)
        while len(self._versions) > KEPT_VERSIONS:
            self._versions.popitem(last=False)

    def close(self) -> None:
        """Write what waits, for 10 s at most."""
        if self._thread.ident is not None and not self._closing:
            self._tell_to_end()
            self._thread.join(_CLOSE_WAIT)
        self._closing = True

    # ---- in the thread ----

    def _tell_to_end(self) -> None:
        self._closing = True
        with suppress(Full):  # then it looks at ``_closing`` once the queue is empty
            self._queue.put_nowait(None)

    def _run(self) -> None:
        try:
            while (found := self._next()) is not None:
                self._write_safely(found)
        finally:
            self._end_file()
            if self.dropped:
                log.warning("the journal lacks %d requests: it could not keep up", self.dropped)

    def _next(self) -> Finished | None:
        if not self._closing:
            return self._queue.get()
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def _write_safely(self, finished: Finished) -> None:
        try:
            self._write(finished)
            if self._queue.empty() and self._file is not None:
                os.fdatasync(self._file)
            self.written += 1
        except Exception as error:  # a full disk, most likely: the engine serves on
            if not self.dropped:
                log.exception("the journal cannot be written: %s", error)
            self.dropped += 1
            self._end_file()  # it may end within a line

    def _write(self, finished: Finished) -> None:
        document = request_document(finished)
        if (digest := self._adapters.get(document.get("adapter", ""))) is not None:
            document["adapter_digest"] = f"{digest:016x}"
        if self._file is None or self._size > self._max_bytes // FILES:
            self._begin_file()
        if self.dropped > self._told:
            self._append({"kind": "dropped", "count": self.dropped - self._told})
            self._told = self.dropped
        for version in _versions_of(document):
            digests = self._versions.get(version)
            if version not in self._in_file and digests is not None:
                self._append({"kind": "version", "version": version, **self._told_as(digests)})
                self._in_file.add(version)
        self._append(document)

    def _told_as(self, digests: Mapping[str, int]) -> dict[str, Any]:
        """The digests; or the version, told of in this file, that has the very same."""
        for version in self._in_file:
            if self._versions.get(version) is digests:
                return {"as": version}
        return {"digests": {name: f"{value:016x}" for name, value in digests.items()}}

    def _begin_file(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file)
            self._end_file()
        self._number += 1
        path = self._directory / f"{self._name}-{self._number:06d}{_SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size, self._in_file = 0, set()
        try:
            self._append({"kind": "engine", **self._facts})
        except OSError:
            path.unlink()  # else a full disk gets one for each request
            raise
        self._forget_oldest(path)

    def _end_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _forget_oldest(self, newest: Path) -> None:
        """Leave room for the new file within the bound; files of other engines count, too."""
        room = self._max_bytes - self._max_bytes // FILES
        for path in reversed([p for p in journal_files(self._directory) if p != newest]):
            with suppress(FileNotFoundError):  # another engine made room, too
                room -= path.stat().st_size
                if room < 0:
                    path.unlink()

    def _append(self, document: Mapping[str, Any]) -> None:
        assert self._file is not None
        data = msgspec.json.encode(document)
        line = b"%08x %s\n" % (crc32(data), data)
        view = memoryview(line)
        while view:  # one write, but on a disk that is all but full
            view = view[os.write(self._file, view) :]
        self._size += len(line)


def request_document(finished: Finished) -> dict[str, Any]:
    """The JSON form of a finished request."""
    output: RequestOutput = finished.output.output()
    adapter = next((one.adapter for one in output.outputs if one.adapter), "")
    return {
        "kind": "request",
        "id": output.request_id,
        "finished": time.time(),
        "prompt": output.prompt_token_ids,
        "params": params_document(finished.params),
        "seeds": list(finished.seeds),
        "images": finished.images,
        "samples": [_sample(one) for one in output.outputs],
        **({"adapter": adapter} if adapter else {}),
    }


def params_document(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    given = {f.name: getattr(params, f.name) for f in fields(params)}
    default = SamplingParams()
    return {name: v for name, v in given.items() if v != getattr(default, name)}


def journal_files(directory: Path) -> list[Path]:
    """Oldest first: names rise with their engines' starts, whose times they are, then count."""
    return sorted(directory.glob(f"*{_SUFFIX}"))


def read_journal(directory: Path) -> Iterator[JournaledRequest]:
    """Every request that is whole, oldest first; ``ConfigError`` where there is no journal."""
    files = journal_files(directory)
    if not files:
        inner = sorted({str(path.parent) for path in directory.glob(f"replica-*/*{_SUFFIX}")})
        where = f"; it holds those of replicas: {', '.join(inner)}" if inner else ""
        raise ConfigError(f"{directory} has no journal: no file there ends with {_SUFFIX}{where}")
    for path in files:
        facts: Mapping[str, Any] = {}
        versions: dict[int, Mapping[str, int]] = {}
        for document in _documents(path):
            if document["kind"] == "engine":
                facts = document
            elif document["kind"] == "version":
                named = document.get("digests", {})
                known = {n: int(v, 16) for n, v in named.items()}
                versions[document["version"]] = versions.get(document.get("as", -1), known)
        # Again: a request may have ended a moment before its version was known here.
        for document in _documents(path):
            if document["kind"] == "request":
                yield _read_request(document, facts, versions)


def find_request(directory: Path, request_id: str) -> JournaledRequest:
    """The last one of that id; ``ConfigError`` where there is none."""
    found = None
    for one in read_journal(directory):
        found = one if one.request_id == request_id else found
    if found is None:
        raise ConfigError(
            f"the journal in {directory} has no request {request_id!r}: it was not finished, was "
            "dropped, or its file has made room for newer ones; without an id the newest are listed"
        )
    return found


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            head, _, data = line.rstrip(b"\n").partition(b" ")
            try:
                if int(head, 16) == crc32(data):
                    yield cast(dict[str, Any], msgspec.json.decode(data))
            except ValueError:
                continue


def _read_request(
    document: Mapping[str, Any],
    facts: Mapping[str, Any],
    versions: Mapping[int, Mapping[str, int]],
) -> JournaledRequest:
    return JournaledRequest(
        request_id=document["id"],
        prompt_token_ids=document["prompt"],
        params=SamplingParams.from_dict(document["params"]),
        seeds=document["seeds"],
        samples=[
            JournaledSample(
                token_ids=one["tokens"],
                logprobs=[float("nan") if p is None else p for p in one["logprobs"]],
                finish_reason=one["finish_reason"],
                weight_versions=tuple(VersionSpan(*span) for span in one["weight_versions"]),
                kv_spans=tuple(VersionSpan(*span) for span in one["kv_spans"]),
            )
            for one in document["samples"]
        ],
        images=document["images"],
        finished=document["finished"],
        facts=facts,
        digests={v: versions[v] for v in _versions_of(document) if v in versions},
        adapter=document.get("adapter", ""),
        adapter_digest=int(document["adapter_digest"], 16)
        if "adapter_digest" in document
        else None,
    )


def _sample(one: Completion) -> dict[str, Any]:
    return {
        "tokens": one.token_ids,
        "logprobs": one.logprobs.raw,
        "finish_reason": one.finish_reason,
        "weight_versions": [[s.version, s.start, s.stop] for s in one.weight_versions],
        "kv_spans": [[s.version, s.start, s.stop] for s in one.kv_spans],
    }


def _versions_of(document: Mapping[str, Any]) -> list[int]:
    """Those whose weights a request was computed by."""
    spans = [s for one in document["samples"] for s in (*one["weight_versions"], *one["kv_spans"])]
    return sorted({span[0] for span in spans})
