"""One rank of the engine: the methods that an executor calls.

``stage_*`` methods run on the rank's staging thread, all others on its main thread, each in the
order in which they were called. Arguments and replies are JSON-able values and tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.config import DEFAULT_TIMEOUT, EngineConfig
from rollout.distributed import (
    Rendezvous,
    TensorParallel,
    check_dtype,
    choose_device,
    join_group,
)
from rollout.distributed.stage import Stage
from rollout.engine.resolved_model import ResolvedModel
from rollout.engine.worker.extension import WorkerExtension, call_extension, make_extension
from rollout.engine.worker.model_runner import ModelRunner
from rollout.engine.worker.profile import RankProfile, read_speed
from rollout.engine.worker.rank_updates import RankUpdates
from rollout.engine.worker.shared_memory_group import SharedMemoryGroup, share_memory
from rollout.errors import EngineClosed, InvalidRequest, VersionConflict
from rollout.loader import save_shard
from rollout.models.weight_io.raw_load import raw_name
from rollout.weight_sync.protocol.digests import slot_rows
from rollout.weight_sync.protocol.messages import UpdateRequest
from rollout.weight_sync.transports.cuda_memory import gpu_uuid, reached_gpus
from rollout.weights import Box, WeightSlot
from rollout.weights.components import POLICY, component_of, own_name
from rollout.wire.codec import from_plain, to_plain
from rollout.wire.frames import Reply, dtype_name

Args = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


class Worker:
    """Built empty; ``start`` loads. An error of one call is that call's alone.

    ``version`` is the live weights'. The version that a step ran by travels with its reply: the
    live one, or the one before while that is there and asked for. ``revert`` undoes a
    commit that failed on another rank. ``shared_fd`` is a descriptor of memory for the ranks'
    collectives. ``device``: where it runs, if not where ``config`` puts a rank of its number.

    ``rank`` of ``size`` are those of the whole engine, ``tp`` those of its stage of a pipeline.
    """

    def __init__(
        self,
        config: EngineConfig,
        tp: TensorParallel,
        shared_fd: int | None = None,
        device: torch.device | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.config, self.tp, self._shared_fd = config, tp, shared_fd
        self.stage = stage or Stage()
        self.rank, self.size = self.stage.rank(tp), self.stage.count * tp.size
        self.device = device or _own_device(choose_device(config.device), self.rank)
        self.version = 0
        self._before: int | None = None  # the version before the last commit, while it is there
        self._runner: ModelRunner | None = None
        self._updates: RankUpdates | None = None
        self._extension: WorkerExtension | None = None
        self._nonfinite: tuple[str, ...] = ()  # tensors of the checkpoint that hold NaN
        self._asleep = 0  # the level of the sleep
        self._profile: RankProfile | None = None
        self._stream: Any = None  # the staging thread's, on a GPU
        self._methods: dict[str, Callable[[Args, Tensors], Reply]] = {
            "start": self._plain(self.start),
            "init_kv": self._plain(self.init_kv),
            "commit": self._plain(self.commit),
            "revert": self._plain(self.revert),
            "move_adapters": self._plain(lambda args: self.runner.move_adapters(args["moves"])),
            "sleep": self._plain(self.sleep),
            "wake_up": self._plain(self.wake_up),
            "info": self._plain(self.info),
            "profile": self._plain(self.profile),
            "save_shard": self._plain(self.save_shard),
            "collective_rpc": self._plain(self.collective_rpc),
            "read_speed": self._plain(lambda _: {"bytes_per_second": read_speed(self.device)}),
            "weight_info": self._plain(self.weight_info),
            "interrupt_update": self._plain(self.interrupt_update),
            "leave_group": self._plain(lambda args: self.updates.leave(args["id"])),
            "stage_member": self._plain(lambda args: self.updates.member(args["id"])),
            "stage_use": self._plain(lambda args: self.updates.use(args["id"])),
            "stage_drop": self._plain(lambda args: self.updates.drop(args)),
            "stage_join": self._plain(lambda args: self.updates.join(args)),
            "stage_foresee": self._plain(lambda _: self.updates.foresee()),
            "stage_begin": self._plain(self.stage_begin),
            "stage_connect": self._plain(lambda args: self.updates.connect(args)),
            "stage_bucket": lambda args, tensors: (self.updates.bucket(args, tensors), {}),
            "stage_seal": self._plain(lambda args: self.updates.seal(args)),
            "stage_abort": self._plain(lambda args: self.updates.abort(args)),
            "stage_restore": self._plain(lambda args: self.updates.restore()),
            "stage_digests": self._plain(self.digests),
            "stage_digests_before": self._plain(self.digests_before),
            "digests": self._plain(self.digests),
            "stage_read_adapter": lambda args, _: self.updates.read_adapter(args),
            "stage_raw_sizes": self._plain(self.raw_sizes),
            "stage_read_raw": lambda args, _: self.read_raw(args),
            "stage_read": lambda args, _: self.read(args),
        }

    def begin(self, method: str, args: Args, tensors: Tensors) -> Callable[[], Reply]:
        """Run one call on the calling thread, but for waiting for a device: the reply does that.

        Either raises whatever it raises. Replies may be asked for in any thread, in this order.
        """
        if self.device.type != "cuda":
            return self._begun(method, args, tensors)
        with torch.cuda.device(self.device):
            return self._begun(method, args, tensors)

    def _begun(self, method: str, args: Args, tensors: Tensors) -> Callable[[], Reply]:
        if method == "step":
            pinned = args["version"] == self._before  # else by what is live, and the reply says so
            version = self.version if self._before is None or not pinned else self._before
            return self.runner.step(args, tensors, version, pinned)
        run = self._methods.get(method)
        if run is None:
            known = ", ".join(("step", *self._methods))
            raise InvalidRequest(f"a rank has no method {method!r}; known: {known}")
        if method.startswith("stage_") and self.device.type == "cuda":
            reply = self._beside(run, args, tensors)
        else:
            reply = run(args, tensors)
        return lambda: reply

    def _beside(self, run: Callable[[Args, Tensors], Reply], args: Args, tensors: Tensors) -> Reply:
        """On the staging thread's own stream: what it waits for must not hold up the steps."""
        if self._stream is None:
            cuda: Any = torch.cuda  # parts of it have no types
            self._stream = cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            try:
                return run(args, tensors)
            finally:
                self._stream.synchronize()  # a reply says that it is done

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineClosed(f"rank {self.rank} has not loaded its model: call start first")
        return self._runner

    @property
    def updates(self) -> RankUpdates:
        if self._updates is None:
            raise EngineClosed(f"rank {self.rank} has not loaded its model: call start first")
        return self._updates

    def close(self) -> None:
        """Let go of the model; calls fail from now on."""
        if self._updates is not None:
            self._updates.leave()
        self._runner = self._updates = self._extension = None
        fd, self._shared_fd = self._shared_fd, None
        if fd is not None:  # it never started
            os.close(fd)

    # ---- main thread ----

    def start(self, args: Args) -> dict[str, Any]:
        """Build the model and load its weights; replies what ``info`` does. Idempotent.

        Collective where ``rendezvous`` names a place: the ranks form their group first. Where
        ``ranks`` are named and this is none of them, that is all: a later call has it load.
        """
        if self._runner is None:
            config = self.config
            if self.device.type == "cuda" and self.size > 1:
                torch.cuda.set_device(self.device)  # this process is the rank's own
            found = ResolvedModel.of(config)
            found.config.check_tensor_parallel(self.tp.size, config.expert_parallel)
            check_dtype(self.device, found.dtype_of(config))
            joined = self.tp.group is not None or bool(self.stage.links)
            if args.get("rendezvous") is not None and not joined:
                self._join(args["rendezvous"])
            if self.rank not in args.get("ranks", (self.rank,)):
                return {}
            extension = None
            if config.worker_extension_cls is not None:  # before a load that takes its time
                extension = make_extension(config.worker_extension_cls)
            self._runner = ModelRunner(
                found.settled(config), found, self.tp, self.device, self.stage
            )
            if extension is not None:
                extension.bind(self.device, self._runner)
            self._extension = extension
            device = str(self.device)
            self._updates = RankUpdates(
                *(self._runner.instances, self.rank, device),
                check_finite=config.check_finite,
                adapters=self._runner.adapters,
            )
            if config.check_finite and config.load_format != "dummy":
                self._nonfinite = self._runner.instances.reader.nonfinite()
        return self.info(args)

    def init_kv(self, args: Args) -> dict[str, Any]:
        """Allocate ``num_blocks`` KV blocks, and ``num_states`` slots of recurrent states, for
        sequences of at most ``max_model_len`` tokens.
        """
        self.runner.kv.allocate(int(args["num_blocks"]), int(args.get("num_states", 0)))
        if "max_model_len" in args:
            self.runner.admit(int(args["max_model_len"]))
        self.runner.capture()
        return {}

    def commit(self, args: Args) -> dict[str, Any]:
        """Make what was staged live as ``version``, or what was live before (``back``).

        The vote came before; ``moved`` says that bytes were, and so it no longer proves what is
        live.
        """
        instances = self.runner.instances
        moved = instances.go_back() if args.get("back") else instances.commit()
        self._before, self.version = self.version, int(args["version"])
        return {"version": self.version, "moved": moved}

    def revert(self, args: Args) -> dict[str, Any]:
        """Be at ``version`` again: undo the last commit if this rank has made it, else nothing."""
        version = int(args["version"])
        if version != self.version:
            if version != self._before:
                raise VersionConflict(
                    f"rank {self.rank} is at version {self.version} and cannot go back to {version}"
                )
            self.runner.instances.revert()
            self.version, self._before = version, None
        return {"version": self.version}

    def sleep(self, args: Args) -> dict[str, Any]:
        """Level 1 frees the KV pages and the shadow, and moves the weights to host memory (on a
        CPU they are there already); level 2 frees the weights too. Steps fail until ``wake_up``.
        """
        self._asleep, self._before = max(self._asleep, int(args["level"])), None
        self.runner.sleep(int(args["level"]))
        return self.info(args)

    def wake_up(self, args: Args) -> dict[str, Any]:
        """Take back what ``tags`` name, "weights" or "kv_cache"; None means both."""
        tags = args.get("tags") or ("weights", "kv_cache")
        if "weights" in tags:
            self.runner.instances.unpark()
        if "kv_cache" in tags:
            self.runner.kv.restore()
            self._asleep = 0
        return self.info(args)

    def info(self, args: Args) -> dict[str, Any]:
        """Who this rank is, and the sizes its engine plans with, in bytes."""
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "device": str(self.device),
            "gpu": gpu_uuid(self.device),
            "reaches": reached_gpus(self.device),
            "dtype": dtype_name(self.runner.dtype),
            "version": self.version,
            "asleep": self._asleep,
            "parked": self.runner.instances.is_parked,
            "num_kv_blocks": self.runner.kv.num_blocks,
            "has_shadow": self.runner.instances.has_shadow,
            "nonfinite": list(self._nonfinite),
            "kept_bytes": self.runner.instances.kept_bytes,
            "hidden_states": self.runner.gives_hidden_states,
            "sparse_layers": list(self.runner.sparse_layers),
            "all_reduces": self.tp.all_reduces,
            "shared_memory": isinstance(self.tp.group, SharedMemoryGroup),
            **self.runner.sizes(),
        }

    def profile(self, args: Args) -> dict[str, Any]:
        """Begin to measure steps where ``on``, else end it and reply what was found."""
        found: dict[str, Any] = {} if self._profile is None else self._profile.close()
        self._profile = RankProfile(self.runner) if args["on"] else None
        return found

    def save_shard(self, args: Args) -> dict[str, Any]:
        """Write what this rank holds live into ``directory``, as part of the save of that id."""
        live, nbytes = self.runner.instances.live, 0
        held: dict[str, list[WeightSlot]] = {}
        for source, slots in live.table.slots.items():
            held.setdefault(component_of(source), []).extend(slots)
        for component, found in held.items():
            into = Path(args["directory"])
            values = (
                (replace(slot, source=own_name(slot.source)), live.read_slot(slot))
                for slot in found
            )
            constants = [
                (_whole(own_name(name), value), value)
                for name, value in live.constants.items()
                if component_of(name) == component and self.rank == 0
            ]
            into = into if component == POLICY else into / component
            every = chain(values, constants)
            nbytes += save_shard(into, self.rank, self.size, every, save=args["save"])
        return {"version": self.version, "num_bytes": nbytes}

    def collective_rpc(self, args: Args) -> dict[str, Any]:
        """What a method of ``worker_extension_cls`` returns here."""
        named = args["method"], args["args"], args["kwargs"]
        return {"result": call_extension(self._extension, *named)}

    def weight_info(self, args: Args) -> dict[str, Any]:
        """The complete set that a full update sends, in file form, and the accepted aliases."""
        runner = self.runner
        return {
            "tensors": [to_plain(meta) for meta in runner.metadata],
            "aliases": dict(runner.table.aliases),
            "prefixes": dict(runner.table.prefixes),
            "spelled": [to_plain(slot) for slot in runner.table.spellings.told],
            "dtype": dtype_name(runner.dtype),
            "quantized": list(dict.fromkeys(slot.source for slot in runner.table.quantized)),
            "adaptable": [] if runner.adapters is None else sorted(runner.adapters.modules),
        }

    def interrupt_update(self, args: Args) -> dict[str, Any]:
        """Free the staging thread if it waits for the sender of update ``update_id``."""
        self.updates.interrupt(args["update_id"])
        return {}

    # ---- staging thread ----

    def stage_begin(self, args: Args) -> dict[str, Any]:
        if UpdateRequest.read(args["request"]).models:
            self._before = None  # it is about to be overwritten
        return self.updates.begin(args)

    def digests(self, args: Args) -> dict[str, Any]:
        """Digest per slot of the live weights, of the tensors in ``names`` or of all."""
        names = args.get("names")
        wanted = None if names is None else frozenset(names)
        before = self.version  # the main thread may commit meanwhile: the caller compares
        rows = slot_rows(self.runner.instances.reader.digest_slots(live=True, names=wanted))
        return {"digests": rows, "versions": [before, self.version]}

    def digests_before(self, args: Args) -> dict[str, Any]:
        """Whether a rollback is possible, and the digests of what it would bring back: None where
        no instance holds that.
        """
        instances = self.runner.instances
        slots = instances.digests_before()
        return {
            "possible": instances.way_back is not None,
            "digests": None if slots is None else slot_rows(slots),
        }

    def read(self, args: Args) -> Reply:
        """What this rank holds of the live tensors in ``names``, box by box."""
        rows: list[Any] = []
        tensors: dict[str, Tensor] = {}
        for slot, values in self.runner.instances.reader.read_slots(frozenset(args["names"])):
            rows.append([slot.source, list(slot.take.starts), list(slot.take.stops)])
            tensors[str(len(tensors))] = values
        return {"boxes": rows, "version": self.version}, tensors

    def raw_sizes(self, args: Args) -> dict[str, Any]:
        """What this rank's live memory is called in an update, and its bytes."""
        found = self.runner.instances.raw_sizes()
        return {"sizes": [[raw_name(self.rank, name), nbytes] for name, nbytes in found]}

    def read_raw(self, args: Args) -> Reply:
        """Some of it; nothing where it is another rank's."""
        if args["rank"] != self.rank:
            return {"version": self.version}, {}
        param = args["name"].removeprefix(raw_name(self.rank, ""))
        values = self.runner.instances.read_raw(param, int(args["start"]), int(args["stop"]))
        return {"version": self.version}, {"0": values}

    def _join(self, rendezvous: Any) -> None:
        """Form the ranks' groups, then bound their collectives: a rank that hangs is found out."""
        where, tp = from_plain(Rendezvous, rendezvous), self.tp
        limit = max(self.config.timeout, DEFAULT_TIMEOUT)

        def join(where: Rendezvous, rank: int, tag: str) -> Any:
            group = join_group(where, rank, self.config.start_timeout, tag=tag)
            group._set_default_timeout(timedelta(seconds=limit))
            return group

        if tp.size > 1:
            group = join(
                replace(where, size=tp.size), tp.rank, f"tensor-parallel-{self.stage.index}"
            )
            if self.device.type == "cpu":
                fd, self._shared_fd = self._shared_fd, None
                group = share_memory(group, fd, tp.rank, tp.size, limit)
            tp.group = group
        if self.stage.count > 1:
            self.stage.connect(join, where, tp.rank)

    @staticmethod
    def _plain(run: Callable[[Args], dict[str, Any]]) -> Callable[[Args, Tensors], Reply]:
        return lambda args, tensors: (run(args), {})


def _own_device(device: torch.device, rank: int) -> torch.device:
    """Each rank of a machine takes a GPU of its own."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device


def _whole(name: str, value: Tensor) -> WeightSlot:
    """Of a tensor that no parameter takes."""
    box = Box.full(tuple(value.shape))
    return WeightSlot(name, box.shape, box, "", box)
