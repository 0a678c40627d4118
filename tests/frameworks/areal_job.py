"""AReaL's own client, as it is installed, against one server; prints what it saw as JSON.

python areal_job.py ADDRESS CHECKPOINT WEIGHTS.safetensors FOLDER ADAPTERS
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import torch
import torch.distributed as dist
from areal.api import ModelAllocation, ModelRequest, ParamSpec, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.infra.utils.http import arequest_with_retry
from areal.utils import name_resolve, names
from areal.utils.network import find_free_ports
from safetensors.torch import load_file

PROMPT = [5, 6, 7, 8]
GROUP = "update_weight_group_0"


def main() -> None:
    address, checkpoint, weights, folder, adapters = sys.argv[1:]
    torch.set_num_threads(1)
    name_resolve.reconfigure(NameResolveConfig(nfs_record_root=f"{folder}/names"))
    config = InferenceEngineConfig(
        experiment_name="e", trial_name="t", fileroot=folder, backend="sglang:d1",
        setup_timeout=60, request_timeout=60, request_retries=2, pause_grace_period=0,
        max_concurrent_rollouts=2, consumer_batch_size=1, tokenizer_path="",
    )  # fmt: skip
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=address, train_data_parallel_size=1)
    try:
        told = {
            "generate": generate(engine, 6, greedy=True),
            "score": score(engine),
            "interrupted": interrupted(engine, address, checkpoint),
            "disk": live(address),
            "refused": refused(address),
        }
        told["group"] = broadcast(engine, weights, address)
        engine.offload()
        engine.onload(tags=["weights", "kv_cache"])
        told["after"] = generate(engine, 6, greedy=True)
        config.use_lora = True
        told["adapters"] = [adapted(engine, f"{adapters}/{n}", n) for n in (1, 2)]
    finally:
        engine.destroy()
    print(json.dumps(told))


def generate(engine: RemoteSGLangEngine, count: int, *, greedy: bool = False) -> dict:
    gconfig = GenerationHyperparameters(
        max_new_tokens=count, greedy=greedy, ignore_eos=True, lora_name="policy"
    )
    request = ModelRequest(input_ids=list(PROMPT), gconfig=gconfig)
    answer = asyncio.run(engine.agenerate(request))
    return {
        "tokens": answer.output_tokens,
        "logprobs": answer.output_logprobs,
        "stop": answer.stop_reason,
    }


def score(engine: RemoteSGLangEngine) -> list[float]:
    row = {"input_ids": torch.tensor([PROMPT]), "loss_mask": torch.tensor([[0, 0, 1, 1]])}
    return engine.compute_logp([row])[0][0].tolist()


def interrupted(engine: RemoteSGLangEngine, address: str, checkpoint: str) -> dict:
    """A request that an update cuts short and AReaL's loop completes with the new weights."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, 400)
        until(lambda: metric(address, "rollout_running_requests") > 0)
        engine.pause_generation()
        name = names.update_weights_from_disk("e", "t", engine.get_version())
        name_resolve.add(name, str(time.time()))
        meta = WeightUpdateMeta(type="disk", path=checkpoint, clear_checkpoint_after_load=False)
        engine.update_weights_from_disk(meta).result(60)
        engine.set_version(1)
        engine.continue_generation()
        return running.result(120)


def adapted(engine: RemoteSGLangEngine, path: str, version: int) -> dict:
    """A sample of the next adapter; the one before it is unloaded."""
    name = names.update_weights_from_disk("e", "t", engine.get_version())
    name_resolve.add(name, str(time.time()), replace=True)
    meta = WeightUpdateMeta(
        type="disk", path=path, use_lora=True, lora_name="policy", version=version,
        lora_keep_versions=1, clear_checkpoint_after_load=False,
    )  # fmt: skip
    engine.update_weights_from_disk(meta).result(60)
    engine.set_version(version)
    return generate(engine, 6, greedy=True)


def refused(address: str) -> str:
    """The error that AReaL's own request code raises where the server refuses."""

    async def ask() -> str:
        try:
            await arequest_with_retry(
                addr=address, endpoint="/update_weights_from_disk",
                payload={"model_path": "/etc"}, max_retries=2, retry_delay=0.1, timeout=30,
            )  # fmt: skip
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it was taken"

    return asyncio.run(ask())


def broadcast(engine: RemoteSGLangEngine, path: str, address: str) -> int:
    """AReaL's own group and verbs, on gloo; a broadcast in two parts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    port = find_free_ports(1)[0]
    meta = WeightUpdateMeta(
        type="xccl", gen_allocation=ModelAllocation.from_str("sglang:d1", name="rollout"),
        nccl_master_address="127.0.0.1", nccl_master_port=port, nccl_group_name=GROUP,
    )  # fmt: skip
    joined = engine.init_weights_update_group(meta)
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0,
        group_name=GROUP,
    )  # fmt: skip
    joined.result(120)
    engine.pause_generation()
    tensors = list(load_file(path).items())
    for part in (tensors[:5], tensors[5:]):
        specs = [ParamSpec(name, tuple(t.shape), str(t.dtype).split(".")[1]) for name, t in part]
        told = engine.update_weights_from_distributed(meta, specs)
        for work in [dist.broadcast(t, src=0, group=group, async_op=True) for _, t in part]:
            work.wait()
        told.result(120)
    engine.continue_generation()
    return live(address)


def live(address: str) -> int:
    return int(httpx.get(f"http://{address}/weight_info").json()["version"])


def metric(address: str, name: str) -> float:
    text = httpx.get(f"http://{address}/metrics").text
    return float(next(x for x in text.splitlines() if x.startswith(f"{name}{{")).split()[-1])


def until(happens, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not happens():
        assert time.monotonic() < end, threading.active_count()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
