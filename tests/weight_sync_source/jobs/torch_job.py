"""DDP, FSDP1 and FSDP2 in one job of two ranks."""

from __future__ import annotations

import time
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from weight_sync_source.jobs.rank import SHORT, TIMEOUT, Rank
from weight_sync_source.jobs.tiny import ALIASES, Tiny

from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.lockstep import agreed_source
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights import TensorMeta
from rollout.weights.wanted import WantedWeights, by_name

BF16, FP32 = torch.bfloat16, torch.float32
IDS = torch.arange(12).view(2, 6)


def sharded(model: Tiny, **settings: object) -> Tiny:
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def flat(use_orig_params: bool) -> FullyShardedDataParallel:
    settings = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    model = Tiny()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FullyShardedDataParallel(layer, **settings)
    return FullyShardedDataParallel(model, **settings)


def wrapped() -> nn.Module:
    """Activation checkpointing and torch.compile put their components into names."""
    model = Tiny()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return torch.compile(model)


def gathers(job: Rank) -> None:
    job.gather("ddp", DistributedDataParallel(Tiny()), BF16)
    job.gather("ddp_wrapped", DistributedDataParallel(wrapped()), FP32)
    job.gather("compiled_ddp", torch.compile(DistributedDataParallel(Tiny())), BF16)
    job.gather("fsdp2_fp32", sharded(Tiny()), FP32)
    job.gather("fsdp2_cast", sharded(Tiny()), BF16)
    mixed = sharded(Tiny(), mp_policy=MixedPrecisionPolicy(BF16, FP32), reshard_after_forward=False)
    mixed(IDS)  # leaves every parameter unsharded, in bf16; the fp32 masters must be sent
    job.gather("fsdp2_mixed", mixed, FP32)
    job.gather("fsdp2_dict", sharded(Tiny()).state_dict(), BF16)  # DTensors and a plain buffer
    job.gather("fsdp2_items", list(sharded(Tiny()).state_dict().items()), FP32)
    model = sharded(Tiny(tied=False))
    buffers = [("model.correction", model.model.correction)]
    job.gather("fsdp2_iterator", chain(model.named_parameters(), buffers), BF16)
    job.gather("fsdp2_untied", sharded(Tiny(tied=False)), BF16)
    job.gather("fsdp2_wrapped", fully_shard(wrapped()), BF16)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    job.gather("hsdp", sharded(Tiny(), mesh=mesh), BF16)
    job.gather("fsdp1", flat(use_orig_params=True), BF16)
    job.gather("fsdp1_flat", flat(use_orig_params=False), BF16)
    # Nothing keeps buffers, or what a wrapper ignores, alike on all ranks.
    for name, model, wrapped_in in (
        ("fsdp2", sharded(Tiny()), None),
        ("fsdp1", flat(use_orig_params=True), None),
        ("ddp", Tiny(), DistributedDataParallel),
    ):
        found = wrapped_in(model) if wrapped_in else model  # which brings buffers into line
        model.model.correction.add_(job.rank)
        job.gather(f"{name}_own_buffers", found, BF16)
    items = list(sharded(Tiny()).state_dict().items())
    job.gather("fsdp2_own_items", [(n, t + job.rank if "corr" in n else t) for n, t in items], BF16)


def sent_and_used(job: Rank) -> None:
    """Gathered before it has run, or where gradients are off, and gone on with."""
    units = flat(use_orig_params=True)
    root = FullyShardedDataParallel(units, device_id=torch.device("cpu"), use_orig_params=True)
    job.gather("fsdp1_bare_root", root, BF16)  # which has no parameters of its own
    try:
        root(IDS)
        job.outcome["runs_first"] = None
    except AssertionError as error:
        job.outcome["runs_first"] = str(error)

    model = flat(use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        job.gather("fsdp1_inference", model, BF16)
    try:
        model(IDS).sum().backward()
        optimizer.step()
        job.outcome["trains_on"] = None
    except RuntimeError as error:
        job.outcome["trains_on"] = str(error)


def amid_a_step(job: Rank) -> None:
    """Gathered between forward and backward: the gradients are those without."""

    def gradients(model: nn.Module, name: str) -> list[torch.Tensor]:
        loss = model(IDS).square().sum()
        if name:
            job.gather(name, model, BF16)
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [getattr(grad, "_local_tensor", grad) for grad in found]

    for name, build in (
        ("fsdp1_amid", lambda: flat(use_orig_params=True)),
        ("fsdp2_amid", lambda: sharded(Tiny(), reshard_after_forward=False)),
    ):
        pairs = zip(gradients(build(), ""), gradients(build(), name), strict=True)
        job.outcome[f"{name}_gradients"] = [torch.equal(a, b) for a, b in pairs]


def failures(job: Rank) -> None:
    model = sharded(Tiny())

    def on_rank_1(index: int) -> None:
        if job.rank == 1 and index == 2:
            raise ValueError("the trainer tripped")

    source = detect(model).source(WantedWeights(aliases=ALIASES, dtype=BF16), timeout=TIMEOUT)
    job.failing("raises", source.agreement, list(source), on_rank_1)

    agreement = detect(model).rank_group(TIMEOUT)
    try:  # a rank that fails leaves its loop and votes elsewhere than those that go on
        agreement.vote(OSError("disk") if job.rank else None, TIMEOUT, "end" if job.rank else "b")
    except Exception as error:
        job.outcome["elsewhere"] = {"type": type(error).__name__, "message": str(error)}

    agreement = detect(model).rank_group(TIMEOUT)
    try:
        agreement.vote(None, TIMEOUT, "seal" if job.rank else "bucket 7")
    except Exception as error:
        job.outcome["out_of_step"] = {"type": type(error).__name__, "message": str(error)}

    info = WeightInfo(
        epoch=1,
        version=3,
        label=None,
        state="idle",
        dtype=BF16,
        tensors=(),
        aliases=ALIASES,
        tensor_parallel_size=1,
        device="cpu",
        transports=(),
    )
    settings = {"version": 4 + job.rank} if job.rank else {"version": 4, "in_flight": "abort"}
    for name, obj, given in (
        ("other_settings", model, settings),
        ("other_tensors", sharded(Tiny(tied=job.rank == 0)), {}),
        ("agreed", model, {} if job.rank else settings),
    ):
        found = detect(obj)
        group = found.rank_group(TIMEOUT)
        try:
            agreed_source(found, info, group, TIMEOUT, settings=given)
            job.outcome[name] = {}
        except Exception as error:
            job.outcome[name] = {"type": type(error).__name__, "message": str(error)}
        group.close()

    def stuck(index: int) -> None:
        if job.rank == 1:
            time.sleep(SHORT + 1.5)

    job.failing("late", detect(model).rank_group(TIMEOUT), [0], stuck, SHORT)
    dist.barrier()

    def fails(index: int) -> None:
        if job.rank == 1:
            time.sleep(2)
        else:
            raise ValueError("tripped alone")

    job.failing("early", detect(model).rank_group(TIMEOUT), [0], fails)
    dist.barrier()

    agreement = detect(model).rank_group(TIMEOUT)
    job.outcome["broadcast"] = agreement.broadcast({"from": job.rank}, TIMEOUT)
    job.outcome["exchange"] = agreement.exchange({"rank": job.rank}, TIMEOUT)
    agreement.close()

    if job.rank == 1:  # does not come at all; the next meeting must not trip over it
        dist.barrier()
    else:
        try:
            detect(model).rank_group(0.5)
        except Exception as error:
            job.outcome["absent"] = {"type": type(error).__name__, "message": str(error)}
        dist.barrier()
    if job.rank == 0:
        dist.barrier()
    else:
        try:
            detect(model).rank_group(0.5)
        except Exception as error:
            job.outcome["absent"] = {"type": type(error).__name__, "message": str(error)}
        dist.barrier()
    agreement = detect(model).rank_group(TIMEOUT)
    agreement.vote(None, TIMEOUT)
    agreement.close()
    last_words(job, detect(model).rank_group(TIMEOUT), "slow_report", late=True)
    last_words(job, detect(model).rank_group(TIMEOUT), "lasting", late=False)


def last_words(job: Rank, group: Agreement, name: str, late: bool) -> None:
    """The first rank does something alone: it misses rank 1 in it, or rank 1 leaves meanwhile."""

    def act() -> dict[str, int]:
        if late:
            group.collect_rows({}, 0.5, "digests")
        return {"version": 7}

    try:
        if job.rank == 1 and late:
            time.sleep(2)
            group.collect_rows({}, TIMEOUT, "digests")
        elif job.rank == 1:
            group.close()
        done = group.first_does(act, TIMEOUT, "commit", dict, dict, lasting=True)
        job.outcome[name] = done
    except Exception as error:
        job.outcome[name] = {"type": type(error).__name__, "message": str(error)}
    group.close()
    dist.barrier()


def untied_there(job: Rank) -> None:
    """The engine holds a head of its own, and the trainer ties it."""
    state = Tiny().state_dict()
    held = [TensorMeta(name, BF16, tuple(tensor.shape)) for name, tensor in state.items()]
    source = detect(sharded(Tiny())).source(
        WantedWeights(dtype=BF16, tensors=by_name(held)), timeout=TIMEOUT
    )
    equal = {}
    for name, tensor in source:
        values = source.local_values(name)
        equal[name] = all(torch.equal(v, state[name][b.slices].to(BF16)) for b, v in values)
        equal[name] &= tensor.is_meta or torch.equal(tensor, state[name].to(BF16))
    job.outcome["untied_there"] = equal
    source.agreement.close()


def who_calls(job: Rank) -> None:
    """What is every rank's own, what is theirs together, and a source that has been used."""
    model = sharded(Tiny())
    state = model.state_dict()
    alone = (Tiny(), Tiny().state_dict(), iter([]), str(job.out))
    together = (model, state, list(state.items()), DistributedDataParallel(Tiny()))
    job.outcome["alone"] = [detect(obj).calls_alone() for obj in alone]
    job.outcome["together"] = [detect(obj).calls_alone() for obj in together]
    used = detect(model).source(WantedWeights(aliases=ALIASES, dtype=BF16), timeout=TIMEOUT)
    assert detect(used).rank_group() is used.agreement
    used.agreement.close()
    try:
        detect(used).rank_group()
    except Exception as error:
        job.outcome["used"] = {"type": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    rank = Rank()
    gathers(rank)
    sent_and_used(rank)
    amid_a_step(rank)
    failures(rank)
    untied_there(rank)
    summoned = flat(use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(summoned):
        rank.refused("summoned", summoned)
    rank.refused("no longer summoned", summoned)
    rank.refused("beneath", summoned.model)
    rank.refused("a unit", summoned.model.layers[0])
    whole = FullyShardedDataParallel(Tiny(), device_id=torch.device("cpu"), use_orig_params=True)
    rank.refused("beneath all", whole.model)
    who_calls(rank)
    rank.finish()
    dist.barrier()
    dist.destroy_process_group()
