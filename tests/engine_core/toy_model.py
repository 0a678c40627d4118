"""A small model that really reads its KV pages, and the rank that runs it.

The state of position ``p`` mixes the weights, the token, ``p`` and the states of *all* positions
before it, which are read from the pages through the block table, before anything of the step is
written. The next token is that state modulo the vocabulary. So a wrong block, a stale prefix or a
missing recompute gives a wrong token; ``chain`` says without pages what is right. With ``groups``
it reads each group's pages, as far as that reaches.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.engine.steps.batch import decode_batch, with_drawn
from rollout.engine.worker.job_thread import JobThread
from rollout.errors import RolloutError, WorkerDied
from rollout.models.decoder.kv_groups import KVGroup

VOCAB = 97
MAX_LEN = 256
_MASK = (1 << 64) - 1
_GARBAGE = 0xDEADBEEF
WHOLE = (KVGroup(layers=(0,)),)

Reply = tuple[dict[str, Any], dict[str, Tensor]]


def mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def state_at(weights: int, token: int, position: int, context: int) -> int:
    return mix(mix(weights * 1_000_003 + token) + 31 * position + context)


def chain(
    tokens: Sequence[int], weights: Sequence[int], groups: Sequence[KVGroup] = WHOLE
) -> list[int]:
    """The state of every position, where ``weights[p]`` computed position ``p``."""
    context, states = 0, list[int]()
    if groups != WHOLE:
        for position, (token, weight) in enumerate(zip(tokens, weights, strict=True)):
            seen = [states[group.first(position) :] for group in groups]
            states.append(state_at(weight, token, position, context_of(position, seen)))
        return states
    for position, (token, weight) in enumerate(zip(tokens, weights, strict=True)):
        states.append(state_at(weight, token, position, context))
        context = (context + mix(states[-1] + position)) & _MASK
    return states


def context_of(position: int, seen: Sequence[Sequence[int]]) -> int:
    """Of the states before ``position`` that each group sees."""
    return (
        sum(
            number * mix(state + position - len(states) + i)
            for number, states in enumerate(seen, 1)
            for i, state in enumerate(states)
        )
        & _MASK
    )


def continuation(prompt: Sequence[int], count: int, weights: int = 0) -> list[int]:
    """The next ``count`` tokens under one set of weights."""
    tokens, context = list(prompt), 0
    for position in range(len(prompt) + count - 1):
        state = state_at(weights, tokens[position], position, context)
        context = (context + mix(state + position)) & _MASK
        if position >= len(prompt) - 1:
            tokens.append(state % VOCAB)
    return tokens[len(prompt) :]


def logprob_of(state: int) -> float:
    """A made-up logprob, exact in float32."""
    return -(state % 1024) / 1024


class ToyExecutor:
    """``size`` lockstep ranks in this process that share one set of pages.

    ``lie`` makes the last rank report another version; ``gate`` holds steps while cleared. With
    ``thread`` calls run there, in their order; ``begun`` counts the steps that were asked for.
    """

    def __init__(
        self,
        size: int = 1,
        block_size: int = 4,
        free_bytes: int = 1 << 20,
        thread: JobThread | None = None,
        groups: Sequence[KVGroup] = WHOLE,
    ) -> None:
        self.size, self.groups = size, groups
        self.thread = thread
        self.begun = 0
        self.halt_at = 0  # the step after which it clears its gate itself
        self.drawn: Tensor | None = None
        self.block_size = block_size
        self.free_bytes = free_bytes
        self.on_death: Callable[[WorkerDied], None] | None = None
        self.version, self.weights = 0, 0
        self.before: int | None = None  # the version before the last commit
        self.contents = {0: 0}  # version -> weights
        self.commits = 0
        self.pages: list[int] = []
        self.steps = 0
        self.lie = False
        self.fail_next: RolloutError | None = None
        self.split: list[RolloutError] = []  # one error per rank for the next step
        self.gate = threading.Event()
        self.gate.set()
        self.dead: WorkerDied | None = None
        self.closed = False

    def start(self) -> None:
        pass

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]:
        futures: list[Future[Reply]] = [Future() for _ in range(self.size)]
        self.begun += method == "step"
        if method == "step" and self.thread is None and not self.gate.is_set():
            late = (method, args, tensors, futures)
            threading.Thread(target=self._wait_and_answer, args=late).start()
            return futures
        if method == "step" and self.split:
            for future, error in zip(futures, self.split, strict=True):
                future.set_exception(error)
            self.split = []
            return futures
        if self.thread is not None:
            self.thread.submit(lambda: self._wait_and_answer(method, args, tensors, futures))
            return futures
        self._answer(method, args, tensors or {}, futures)
        return futures

    def kill(self) -> None:
        """What a dying rank does: pending futures fail at once and ``on_death`` is told."""
        self.dead = WorkerDied("rank 0 died")
        self.gate.set()
        if self.on_death is not None:
            self.on_death(self.dead)

    def close(self) -> None:
        self.closed = True
        self.gate.set()
        if self.thread is not None:
            self.thread.close(5)

    def _wait_and_answer(
        self, method: str, args: Any, tensors: Any, futures: list[Future[Reply]]
    ) -> None:
        if method == "step":
            self.gate.wait(30)
        self._answer(method, args, tensors or {}, futures)

    def _answer(self, method: str, args: Any, tensors: Any, futures: list[Future[Reply]]) -> None:
        try:
            if self.dead is not None:
                raise self.dead
            replies = [getattr(self, f"_{method}")(args, tensors)]
            if method == "step":
                others = [({"version": self._by(args)[0] - self.lie}, {})] * (self.size - 1)
                replies += others
            else:
                replies *= self.size
        except (RolloutError, RuntimeError) as error:
            for future in futures:
                future.set_exception(error)
            return
        for future, reply in zip(futures, replies, strict=True):
            future.set_result(reply)

    def _info(self, args: Any, tensors: Any) -> Reply:
        sizes = {"free_bytes": self.free_bytes, "weight_bytes": 1000, "kv_block_bytes": 100}
        facts = {"device": "cpu", "version": self.version, "hidden_states": False}
        start = {"rank": 0, "bytes_read": 0, "read_seconds": 0.0, "seconds": 0.0}
        told = [[len(group.layers), group.window, group.chunk] for group in self.groups]
        return {**facts, **sizes, **start, "kv_groups": told}, {}

    def _init_kv(self, args: Any, tensors: Any) -> Reply:
        self.pages = [_GARBAGE] * (args["num_blocks"] * self.block_size)
        return {}, {}

    def _sleep(self, args: Any, tensors: Any) -> Reply:
        self.pages = [_GARBAGE] * len(self.pages)
        return {}, {}

    def _wake_up(self, args: Any, tensors: Any) -> Reply:
        return {}, {}

    def _commit(self, args: Any, tensors: Any) -> Reply:
        self.commits += 1
        self.before = self.version
        self.version, self.weights = args["version"], self.commits
        self.contents[self.version] = self.weights
        return {"version": self.version, "moved": False}, {}

    def _revert(self, args: Any, tensors: Any) -> Reply:
        self.version = args["version"]
        self.weights = self.contents[self.version]
        return {"version": self.version}, {}

    def _by(self, args: Any) -> tuple[int, int]:
        """The version that a step is by, and its weights; as a rank decides it."""
        version = self.before if args["version"] == self.before else self.version
        assert version is not None
        return version, self.contents[version]

    def _step(self, args: Any, tensors: Any) -> Reply:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.steps += 1
        if self.steps == self.halt_at:
            self.gate.clear()
        batch, sampling = decode_batch(args, tensors)
        drawn, self.drawn = self.drawn, None
        if "previous_rows" in tensors:
            batch = with_drawn(batch, tensors, drawn)
        starts = batch.query_starts.tolist()
        whole = self.groups == WHOLE
        contexts = [self._context(batch, s) if whole else 0 for s in range(len(starts) - 1)]
        states: list[int] = []
        version, weights = self._by(args)
        for s, context in enumerate(contexts):
            for row in range(starts[s], starts[s + 1]):
                position = int(batch.positions[row])
                if not whole:
                    context = context_of(position, self._seen(batch, s, position))
                states.append(state_at(weights, int(batch.input_ids[row]), position, context))
                for slot in batch.slot_mapping.view(-1, len(batch.input_ids))[:, row].tolist():
                    self.pages[slot] = states[-1]
                context = (context + mix(states[-1] + position)) & _MASK
        return self._reply([states[row] for row in batch.logit_rows.tolist()], sampling, version)

    def _context(self, batch: Any, s: int) -> int:
        """The sum over the positions before this step, read from the pages."""
        first = int(batch.positions[batch.query_starts[s]])
        table, size = batch.block_tables[s].tolist(), self.block_size
        stored = [self.pages[table[p // size] * size + p % size] for p in range(first)]
        return sum(mix(state + p) for p, state in enumerate(stored)) & _MASK

    def _seen(self, batch: Any, s: int, position: int) -> list[list[int]]:
        """What each group sees before a position, from its own pages."""
        tables = batch.block_tables.view(len(self.groups), -1, batch.block_tables.shape[-1])
        size, found = self.block_size, []
        for group, table in zip(self.groups, tables[:, s].tolist(), strict=True):
            reach = range(group.first(position), position)
            found.append([self.pages[table[p // size] * size + p % size] for p in reach])
        return found

    def _reply(self, states: list[int], sampling: Any, version: int) -> Reply:
        count = len(sampling.counters)
        tokens = [s % VOCAB for s in states[:count]] + sampling.targets.tolist()
        self.drawn = torch.tensor(tokens[:count])
        logprobs = torch.tensor([logprob_of(s) for s in states], dtype=torch.float32)
        out = {
            "tokens": torch.tensor(tokens, dtype=torch.int64),
            "raw": logprobs,
            "processed": logprobs[:count].clone(),
            "log_kept_mass": torch.zeros(count),
        }
        width = int(sampling.num_top.max(initial=0))
        if width:
            out["top_ids"] = out["tokens"][:, None].repeat(1, width)
            out["top_logprobs"] = logprobs[:, None].repeat(1, width)
        return {"version": version}, out


def write_config(path: Path, **fields: Any) -> str:
    """A ``config.json`` with the toy's vocabulary and length; its weights are never read."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_LEN,
        "rope_theta": 10000.0,
        **fields,
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
