"""TRL's ``AsyncGRPOTrainer`` over a ``Rollout``: its two official seams.

    with Rollout.connect("host:50051") as r:
        worker = RolloutWorker(r, dataset, rewards)
        trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(r), rollout_worker=worker)
        trainer.train()

``WeightTransfer`` is TRL's ``WeightTransferProtocol``, ``RolloutWorker`` its
``RolloutWorkerProtocol`` (TRL 1.16, ``trl.experimental.async_grpo``). Neither needs vLLM.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from rollout.api import Rollout, Session, Trajectory
from rollout.errors import ConfigError, RolloutError, some
from rollout.generation import SamplingParams
from rollout.weight_sync.protocol.receipts import UpdateReceipt

Row = Mapping[str, Any]
Play = Callable[[Session, Row, SamplingParams], None]

_LOOK = 0.2  # seconds between looks at whether the worker was stopped
_END_WAIT = 30.0
_NO_COLUMNS = ("completion", "completion_ids")  # of a row: they would be taken for the samples'
_ADAPTER = "trl-policy-v"  # as TRL names what it has the server load


class WeightTransfer:
    """Sends the trainer's weights as transactions; generation goes on meanwhile.

    ``pause`` and ``resume`` are empty: an update is committed between two steps. ``receipts`` has
    one of each update. ``options`` are those of ``Rollout.update_weights``. An update that fails
    raises out of ``train()``; the old version serves on.
    """

    def __init__(self, rollout: Rollout, **options: Any) -> None:
        self._rollout, self._options = rollout, options
        self.receipts: list[UpdateReceipt] = []

    def init_weight_transfer(self) -> None:
        """Raises where nothing answers."""
        self._rollout.weight_info()

    def pause(self) -> None:
        """Nothing has to wait."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Make what ``iterator`` yields the next version.

        It is read to its end whatever happens: other ranks of the trainer take part in its gathers.
        """
        try:
            self.receipts.append(self._rollout.update_weights(iterator, **self._options))
        finally:
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Nothing was held."""

    def destroy(self) -> None:
        """The ``Rollout`` is its owner's to close."""


class RolloutWorker:
    """Plays the dataset's rows, ``num_generations`` times each, scores them and queues the samples.

    ``reward_funcs``: TRL's: ``f(prompts=, completions=, completion_ids=, **columns)`` gives a
    number per sample, or None (or NaN) where it has none to give; it may be async. ``play``: one
    conversation, ``play(session, row, params)``; without it the row's "prompt" (messages, or text)
    is answered once. What it plays becomes one training row: exact ids, the loss mask and the
    logprobs they were sampled with. ``params``: of every turn; each conversation has a seed of
    its own. ``max_inflight``: conversations that run at the same time; ``queue_size``: samples that
    may wait for the trainer.

    A conversation that has a turn cut short, by an abort or an error, or that has no sampled token
    at all is neither scored nor queued, and counts in ``dropped``. A sample's ``model_version`` is
    that of the oldest weights that any of its tokens came from.
    """

    def __init__(
        self,
        rollout: Rollout,
        dataset: Sequence[Row] | Any,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        params: SamplingParams | Mapping[str, Any] | None = None,
        play: Play | None = None,
        num_generations: int = 8,
        max_inflight: int = 32,
        queue_size: int = 1024,
        seed: int = 0,
    ) -> None:
        if num_generations < 2 or max_inflight < num_generations:
            raise ConfigError(
                "num_generations must be at least 2, for advantages are relative to their group, "
                "and max_inflight at least num_generations"
            )
        self._rollout, self._rows = rollout, _numbered(dataset)
        self._rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        if not self._rewards:
            raise ConfigError("reward_funcs is empty; give at least one reward function")
        self._params, self._play = SamplingParams.of(params), play or answer_once
        self._generations, self._groups = num_generations, max_inflight // num_generations
        self._seed = seed
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_size)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._rows_lock = threading.Lock()
        self.failure: BaseException | None = None  # what ended it
        self.dropped = 0  # conversations that were cut short, or had no token sampled
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = time.monotonic()
        self._offset = 0  # the engine's version less the trainer's

    # ---- TRL's protocol ----

    def start(self) -> None:
        """Begin; after the first sync."""
        self._beat = time.monotonic()
        self._threads = [
            threading.Thread(target=self._work, name=f"rollout-trl-{index}", daemon=True)
            for index in range(self._groups)
        ]
        # One loop for all groups, as TRL has: a client that a reward function keeps belongs to it.
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        threading.Thread(target=_serve, args=(runner,), daemon=True).start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; what is being sampled is aborted."""
        self._stopping.set()
        end = time.monotonic() + _END_WAIT
        while any(t.is_alive() for t in self._threads) and time.monotonic() < end:
            try:
                self._rollout.abort()
            except RolloutError:
                break
            for thread in self._threads:
                thread.join(_LOOK / len(self._threads))
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def update_model_version(self, model_version: int) -> None:
        """From now on conversations are answered by what was sent last: the weights, or, where
        TRL loads adapters that are served unmerged, the one that it names by this version."""
        name = f"{_ADAPTER}{model_version}"
        live = self._rollout.weight_info()
        served = name in live.adapters
        self._offset = (live.adapters[name] if served else live.version) - model_version
        if served:
            self._params = replace(self._params, adapter=name)

    def check_health(self, stale_after_s: float) -> None:
        """Raises what a reward or the engine has raised, or that nothing was made for so long."""
        if self.failure is not None:
            what = f"{type(self.failure).__name__}: {self.failure}"
            raise RuntimeError(f"the rollout worker has failed: {what}") from self.failure
        age = time.monotonic() - self._beat
        if age > stale_after_s:
            raise RuntimeError(
                f"no group of samples was finished for {age:.0f} s; {self.dropped} conversations "
                "were cut short or had no token sampled"
            )

    # ---- helpers ----

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._rows_lock:
                    number, row = next(self._rows)
                samples = self._group(number, row)
                for sample in samples:
                    self._put(sample)
                if samples:  # else nothing was made, and it may be so for ever
                    self._beat = time.monotonic()
        except Exception as error:  # noqa: BLE001 - told by ``check_health``
            if not self._stopping.is_set():
                self.failure = error

    def _put(self, sample: Any) -> None:
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=_LOOK)
            except queue.Full:
                self._beat = time.monotonic()  # the trainer is behind, nothing is wrong here
            else:
                return

    def _group(self, number: int, row: Row) -> list[Any]:
        """The scored samples of one row."""
        _check_row(number, row)
        first = (self._seed << 40) + number * self._generations
        sessions = [self._rollout.session() for _ in range(self._generations)]
        failures: list[BaseException] = []

        def play(index: int, session: Session) -> None:
            try:
                self._play(session, row, replace(self._params, seed=first + index))
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        players = [
            threading.Thread(target=play, args=each, daemon=True) for each in enumerate(sessions)
        ]
        for player in players:
            player.start()
        for player in players:
            player.join()
        if failures:
            raise failures[0]
        return self._scored(number, row, sessions)

    def _scored(self, number: int, row: Row, sessions: Sequence[Session]) -> list[Any]:
        sessions = [session for session in sessions if _is_whole(session.trajectory())]
        with self._rows_lock:
            self.dropped += self._generations - len(sessions)
        if not sessions:
            return []
        played = [session.trajectory() for session in sessions]
        completions = [_completion(session, row) for session in sessions]
        rewards = self._rewarded(row, completions, played)
        totals = np.nansum(rewards, axis=0)
        totals[np.isnan(rewards).all(axis=0)] = np.nan
        known = totals[~np.isnan(totals)]
        mean, spread = (known.mean(), known.std()) if known.size else (np.nan, np.nan)
        samples = []
        for index, trajectory in enumerate(played):
            scored = not np.isnan(totals[index])
            metrics = {"reward": float(totals[index]), "reward_std": float(spread)}
            for reward, values in zip(self._rewards, rewards, strict=True):
                metrics[f"rewards/{_name(reward)}"] = float(values[index])
            advantage = (totals[index] - mean) / (spread + 1e-8) if scored else 0.0
            sample = self._sample(trajectory, row, completions[index], metrics)
            sample.advantage, sample.group_id = float(advantage), number
            samples.append(sample)
        return samples

    def _rewarded(
        self, row: Row, completions: Sequence[Any], played: Sequence[Trajectory]
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[functions, samples]; NaN where a function gave None."""
        count = len(played)
        columns: dict[str, list[Any]] = defaultdict(list)
        for key, value in row.items():
            if key not in _NO_COLUMNS:
                columns[f"{key}s" if key == "prompt" else key] = [value] * count
        ids = [trajectory.token_ids.tolist() for trajectory in played]
        found = []
        for reward in self._rewards:
            values = reward(completions=list(completions), completion_ids=ids, **columns)
            if inspect.iscoroutine(values):
                assert self._loop is not None
                values = asyncio.run_coroutine_threadsafe(values, self._loop).result()
            values = list(values)
            if len(values) != count:
                raise ConfigError(
                    f"the reward function {_name(reward)} gave {len(values)} values for {count}"
                )
            found.append([np.nan if value is None else float(value) for value in values])
            if np.isinf(found[-1]).any():
                raise ConfigError(
                    f"the reward function {_name(reward)} gave {found[-1]}; a reward must be "
                    "finite, or None where there is none to give"
                )
        return np.array(found, dtype=np.float64)

    def _sample(
        self, trajectory: Trajectory, row: Row, completion: Any, metrics: dict[str, float]
    ) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        start = len(trajectory.prompt_token_ids)
        ids = np.concatenate([trajectory.prompt_token_ids.numpy(), trajectory.token_ids.numpy()])
        mask, logprobs = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.float32)
        mask[start:] = trajectory.mask.numpy()
        logprobs[start:] = trajectory.processed_logprobs.numpy()
        oldest = int(trajectory.weight_versions[trajectory.mask].min())
        return RolloutSample(
            prompt=row.get("prompt"),
            completion=completion,
            input_ids=ids,
            completion_mask=mask,
            old_log_probs=logprobs,
            advantage=0.0,
            model_version=oldest - self._offset,
            group_id=0,
            metrics=metrics,
            enqueued_at=time.time(),
        )


def _numbered(dataset: Any) -> Iterator[tuple[int, Row]]:
    """The rows, again and again; the first is looked at now."""
    rows = itertools.cycle(dataset)
    first = next(rows, None)
    if first is None:
        raise ConfigError("the dataset is empty; give the rollout worker at least one row")
    _check_row(0, first)
    return enumerate(itertools.chain([first], rows))


def _check_row(number: int, row: Any) -> None:
    if not isinstance(row, Mapping) or "prompt" not in row:
        has = some([str(key) for key in row]) if isinstance(row, Mapping) else type(row).__name__
        raise ConfigError(
            f'row {number} of the dataset ({has}) has no "prompt"; give each row its messages, or '
            "its text, under that name"
        )


def _name(reward: Callable[..., Any]) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


def _serve(runner: asyncio.Runner) -> None:
    with runner:  # its end cancels what is still awaited
        runner.get_loop().run_forever()


def answer_once(session: Session, row: Row, params: SamplingParams) -> None:
    """One answer to the row's "prompt": messages, or text."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        session.generate(prompt, params)
    else:
        session.chat(prompt, params)


def _is_whole(trajectory: Trajectory) -> bool:
    return not trajectory.is_cut_short and bool(trajectory.mask.any())


def _completion(session: Session, row: Row) -> Any:
    """What reward functions are shown: the messages after the prompt's, or the text."""
    if isinstance(row.get("prompt"), str):
        return session.text
    return session.messages[len(row["prompt"]) :]
