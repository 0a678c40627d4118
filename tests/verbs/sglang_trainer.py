"""A trainer process that sends weights as SGLang's clients do; prints what went wrong.

Its group is a torch process group under a name of its own, beside the default one of the job; with
``--stages`` there are several, as slime has one of each pipeline stage, and each sends its part.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

NAME = "update_weights_0"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("path")
    parser.add_argument("ports", type=lambda said: [int(port) for port in said.split(",")])
    parser.add_argument("--label")
    parser.add_argument("--late-label")
    parser.add_argument("--buckets", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--flattened", action="store_true")
    parser.add_argument("--session", action="store_true")
    parser.add_argument("--part", dest="whole", action="store_false")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with httpx.Client(base_url=args.url, timeout=120) as http, ThreadPoolExecutor(1) as pool:

        def post(path: str, **body: object) -> httpx.Response:
            reply = http.post(f"/{path}", json=body)
            if reply.status_code != 200:
                print(path, reply.status_code, reply.text)
            return reply

        ranks = http.get("/get_server_info").json()["tp_size"]
        names = [NAME] if args.stages == 1 else [f"slime-pp_{i}" for i in range(args.stages)]
        groups = {
            name: join(post, pool, name, args.ports[n], ranks) for n, name in enumerate(names)
        }
        for _ in range(args.rounds):
            update(post, pool, groups, args)
        for name in groups:
            post("destroy_weights_update_group", group_name=name)
    dist.destroy_process_group()


def join(post, pool, name: str, port: int, ranks: int) -> dist.ProcessGroup:
    init = pool.submit(
        post, "init_weights_update_group", master_address="127.0.0.1", master_port=str(port),
        rank_offset=1, world_size=ranks + 1, group_name=name, backend="gloo",
    )  # fmt: skip
    group = named_group(name, port, ranks + 1)
    assert init.result().json()["success"] is True
    return group


def update(post, pool, groups: dict[str, dist.ProcessGroup], args: argparse.Namespace) -> None:
    """Pause, every group's buckets in turn, go on."""
    assert post("pause_generation", mode="in_place").status_code == 200
    if args.session:
        post("begin_weight_update")
    tensors = list(load_file(args.path).items())
    size = -(-len(tensors) // args.buckets)
    parts = [tensors[first : first + size] for first in range(0, len(tensors), size)]
    for number, part in enumerate(parts):
        send(post, pool, *list(groups.items())[number % len(groups)], part, args)
    if args.late_label:
        post("update_weight_version", new_version=args.late_label, abort_all_requests=False)
    if args.session:
        assert post("end_weight_update").status_code == 200
    for _ in range(1 if args.whole else 2):  # as clients that try again do
        post("continue_generation")


def named_group(name: str, port: int, size: int) -> dist.ProcessGroup:
    """What frameworks' trainers form: rank 0 listens, and keys lie below the group's name."""
    limit = timedelta(seconds=120)
    at = c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=limit)
    store, rank, size = next(at)
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store), group_name=name,
        backend_options=None, timeout=limit,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def send(post, pool, name, group, tensors, args) -> None:
    body = {
        "names": [name for name, _ in tensors],
        "dtypes": [str(t.dtype) for _, t in tensors],
        "shapes": [list(t.shape) for _, t in tensors],
        "group_name": name,
        "flush_cache": False,
        "weight_version": args.label,
    }
    if args.flattened:
        body["load_format"] = "flattened_bucket"
    told = pool.submit(post, "update_weights_from_distributed", **body)
    values = [t.contiguous() for _, t in tensors]
    if args.flattened:
        values = [torch.cat([t.flatten().view(torch.uint8) for t in values])]
    for work in [dist.broadcast(t, src=0, group=group, async_op=True) for t in values]:
        work.wait()
    assert told.result().json()["success"] is True


if __name__ == "__main__":
    main()
