"""The process that follows grammars; see the package. It ends when its engine's sockets close."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import mmap
import os
import resource
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollout.engine.structured.process import (
    DONE,
    FOLLOWS,
    NO_ROW,
    PROGRESS,
    REFUSED,
    SLOW,
    STUCK,
    mask_width,
)
from rollout.engine.tokenizer import Tokenizer
from rollout.errors import InvalidRequest, RolloutError, to_wire
from rollout.wire.frames import recv_frame, send_frame

log = logging.getLogger(__name__)

MAX_COMPILED = 256
MAX_MEMORY = 4 << 30  # bytes beyond what the libraries take
MAX_SECONDS = 1.0  # of processor time for one sequence, and beside it
SECONDS_OF_A_TOKEN = 0.005
MAX_SPACES = 64  # between two tokens of JSON, so that a model cannot go on with nothing else


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rollout.engine.structured")
    for name in ("--compile-fd", "--mask-fd", "--progress-fd"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when it ends
    calls, steps = (socket.socket(fileno=fd) for fd in (options.compile_fd, options.mask_fd))
    first = recv_frame(calls)
    if first is None:
        return
    compiler = Compiler(**first[0])
    gc.freeze()  # all that was imported stays: searches for garbage were a third of its start
    gc.enable()
    _bound_memory()
    progress = mmap.mmap(options.progress_fd, mmap.PAGESIZE)
    follower, following = Follower(compiler, progress), threading.Event()
    args = (steps, follower, following)
    threading.Thread(target=_serve_masks, args=args, daemon=True).start()
    following.wait()
    send_frame(calls, {})
    while (frame := recv_frame(calls)) is not None:
        try:
            compiler.get(frame[0]["spec"])
            send_frame(calls, {})
        except RolloutError as error:
            send_frame(calls, {"error": to_wire(error)})


def _serve_masks(steps: socket.socket, follower: Follower, following: threading.Event) -> None:
    """Ends the process with the engine's end of the socket, or at a defect."""
    try:
        follower.show(NO_ROW)
        following.set()
        while (frame := recv_frame(steps)) is not None:
            states, masks = follower.step(frame[0]["rows"], frame[0]["forget"])
            send_frame(steps, {"states": states}, {"masks": masks})
    except Exception:
        log.exception("a grammar could not be followed")
    finally:
        os._exit(0)


class Compiler:
    """Grammars of one vocabulary, the newest kept. Thread-safe."""

    def __init__(self, tokenizer: Mapping[str, Any], vocab_size: int, eos_ids: list[int]) -> None:
        import xgrammar

        loaded = Tokenizer.load(**tokenizer)
        assert loaded is not None, "the engine has a tokenizer"
        self.vocab_size, self._xgrammar = vocab_size, xgrammar
        self.mask_width = mask_width(vocab_size + (not eos_ids))  # of xgrammar's own masks
        # xgrammar wants a token that ends a grammar: without one, an id beyond the vocabulary.
        self.own_stop = None if eos_ids else vocab_size
        self._info = xgrammar.TokenizerInfo.from_huggingface(
            loaded.hugging_face,
            vocab_size=vocab_size + (not eos_ids),
            stop_token_ids=eos_ids or [vocab_size],
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, spec: Mapping[str, Any]) -> Any:
        """Raises ``InvalidRequest`` with xgrammar's reason."""
        key = json.dumps(spec, sort_keys=True)
        with self._lock:
            found = self._compiled.pop(key, None)
        if found is None:
            try:
                found = self._compile(spec)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = str(error).partition("] ")[2] or str(error)
                raise InvalidRequest(
                    f"structured_outputs cannot be compiled: {' '.join(reason.split())[:600]}"
                ) from error
        with self._lock:
            self._compiled[key] = found
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def matcher(self, spec: Mapping[str, Any]) -> Any:
        return self._xgrammar.GrammarMatcher(self.get(spec))

    def _compile(self, spec: Mapping[str, Any]) -> Any:
        make = self._compiler
        if "json" in spec:
            spaces = not spec.get("disable_any_whitespace", False)
            schema = json.dumps(spec["json"])
            if not spaces:
                return make.compile_json_schema(schema, any_whitespace=False)
            return make.compile_json_schema(schema, max_whitespace_cnt=MAX_SPACES)
        if "json_object" in spec:
            return make.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_SPACES)
        if "regex" in spec:
            return make.compile_regex(spec["regex"])
        if "choice" in spec:
            texts = (json.dumps(text, ensure_ascii=False) for text in spec["choice"])
            return make.compile_grammar(f"root ::= {' | '.join(texts)}")
        if "structural_tag" in spec:
            return make.compile_structural_tag(json.dumps(spec["structural_tag"]))
        return make.compile_grammar(spec["grammar"])


class Follower:
    """Where each sequence is in its grammar; ``progress`` shows the row under way."""

    def __init__(self, compiler: Compiler, progress: mmap.mmap) -> None:
        self._compiler, self._progress = compiler, progress
        self._matchers: dict[int, Any] = {}
        self._left: dict[int, float] = {}  # seconds that each may still take
        vocab = torch.zeros(mask_width(compiler.vocab_size) * 32, dtype=torch.bool)
        vocab[: compiler.vocab_size] = True
        self._inside = _packed(vocab)

    def show(self, row: int) -> None:
        PROGRESS.pack_into(self._progress, 0, row, threading.get_native_id())

    def step(
        self, rows: Sequence[Mapping[str, Any]], forget: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """For each row what became of it, and the tokens that may come next."""
        for sequence in forget:
            self._matchers.pop(sequence, None)
            self._left.pop(sequence, None)
        masks = torch.zeros(len(rows), self._compiler.mask_width, dtype=torch.int32)
        states = []
        for number, row in enumerate(rows):
            self.show(number)
            states.append(self._bounded(row, masks[number : number + 1]))
        self.show(NO_ROW)
        own = masks[:, : len(self._inside)] & self._inside
        for number, some_left in enumerate(own.any(1).tolist()):
            if states[number] == FOLLOWS and not some_left:
                states[number] = DONE if self._ends(masks[number]) else STUCK
        return states, own.contiguous()

    def _ends(self, mask: torch.Tensor) -> bool:
        """Whether the end may follow, where that is an id beyond the vocabulary."""
        stop = self._compiler.own_stop
        return stop is not None and bool(int(mask[stop // 32]) >> (stop % 32) & 1)

    def _bounded(self, row: Mapping[str, Any], mask: torch.Tensor) -> int:
        """Of a sequence that has used up its time, too."""
        sequence = row["sequence"]
        if "spec" in row:  # what compiling takes is not the sequence's own
            self._matchers[sequence] = self._compiler.matcher(row["spec"])
        began = time.thread_time()
        state = self._one(row, mask)
        left = self._left.get(sequence, MAX_SECONDS)
        left += SECONDS_OF_A_TOKEN * len(row["tokens"]) - (time.thread_time() - began)
        self._left[sequence] = left
        return SLOW if left < 0 else state

    def _one(self, row: Mapping[str, Any], mask: torch.Tensor) -> int:
        matcher = self._matchers[row["sequence"]]
        for token in row["tokens"]:
            if matcher.is_terminated() or not matcher.accept_token(token):
                return REFUSED
        if matcher.is_terminated():
            return DONE
        mask.fill_(-1)
        matcher.fill_next_token_bitmask(mask)  # leaves the mask alone where all may follow
        return FOLLOWS


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """int32 [n / 32] of bool [n], the lowest bit first."""
    words = (bits.view(-1, 32).long() << torch.arange(32)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _bound_memory() -> None:
    """What takes more than ``MAX_MEMORY`` from here on fails here, and not the whole machine."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData")), None)
    if used is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_MEMORY, hard))
