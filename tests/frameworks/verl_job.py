"""verl's own registries, client and configuration over Ray, one replica; prints one JSON object.

verl_jobs.py runs it: verl_job.py MODEL OTHER_MODEL
"""

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from verl.utils.fsdp_utils import collect_lora_params, replace_lora_wrapper
from verl.workers.config import RolloutConfig
from verl.workers.config.model import MtpConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry
from verl_replica import hybrid, run

from rollout.errors import ConfigError
from rollout.integrations.verl_checkpoint import TransportEngine
from rollout.integrations.verl_section import engine_settings

torch.set_num_threads(1)
model, other = sys.argv[1:]


class OneServer(FullyAsyncLLMServerClient):
    """verl's client without its load balancer: there is one server."""

    def __init__(self, handle, config):
        self.config, self._handle = config, handle

    async def _acquire_server(self, request_id, **_):
        return "0", self._handle

    def _release_server(self, server_id, request_id):
        pass


config = RolloutConfig(
    name="rollout", mode="async", prompt_length=32, response_length=448, dtype="float32",
    tensor_model_parallel_size=1, max_num_seqs=16, max_num_batched_tokens=256, load_format="auto",
    engine_kwargs={"rollout": {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64}},
    free_cache_engine=True, ignore_eos=True, repetition_penalty=1.5,
)  # fmt: skip
where = SimpleNamespace(path=model, local_path=model)


def refused(kind="replica", said=config, **arguments):
    """Why verl cannot have this, told before it starts anything."""
    try:
        if kind == "replica":
            RolloutReplicaRegistry.get("rollout")(0, said, where, **arguments)
        else:
            get_rollout_class("rollout", "async")(said, where, None)
    except ConfigError as error:
        return str(error)


def unfit():
    of_several = replace(config, tensor_model_parallel_size=4)
    copies = replace(config, data_parallel_size=2)
    found = {"copies": refused(said=copies), "worker's copies": refused("worker", copies)}
    found["nodes"] = refused(said=of_several, gpus_per_node=2)
    found["logits"] = refused(said=replace(config, logprobs_mode="raw_logits"))
    found["qat"] = refused(said=replace(config, qat={"enable": True}))
    return found | {"reward": refused(is_reward_model=True), "fits": refused()}


def followed():
    """What of verl's section the engine is told beside what the course shows."""
    said = replace(
        config, tensor_model_parallel_size=2, pipeline_model_parallel_size=3,
        expert_parallel_size=2, quantization="fp8",
        max_num_batched_tokens=64, full_determinism=True, enforce_eager=True,
        cudagraph_capture_sizes=[1, 8],
        mtp=MtpConfig(enable=True, enable_rollout=True, num_speculative_tokens=3),
    )  # fmt: skip
    return {
        name: [engine_settings(one, 480).get(name) for one in (config, said)]
        for name in (
            "pipeline_parallel_size",
            "expert_parallel",
            "quantization",
            "max_num_batched_tokens",
            "deterministic",
            "cuda_graphs",
            "cuda_graph_sizes",
            "draft_component",
            "num_speculative_tokens",
        )
    }


async def sent_apart(replica):
    """What verl sends to a rollout apart of a model with adapters that it does not merge."""
    said = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(other), said)
    params = collect_lora_params(peft, layered_summon=False, base_sync_done=False)
    params = {replace_lora_wrapper(name, said): value for name, value in params.items()}
    engine = TransportEngine(bucket_size=1 << 20, is_master=True)
    engine.init_process_group(
        [(replica.server_handle, *await replica.server_handle.reached_at.remote())]
    )
    try:
        await engine.send_weights(iter(params.items()), global_steps=13)
    except Exception as error:
        return str(error)
    finally:
        engine._close()


async def course():
    found = {"unfit": unfit(), "followed": followed()}
    replica, adapter = await hybrid(config, where)
    server = SimpleNamespace(name="rollout", full_determinism=True, response_length=448)
    client = OneServer(
        replica.server_handle, SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=server))
    )
    asked = {"temperature": 1.0, "max_tokens": 8, "logprobs": True, "seed": 3}
    asked |= {"repetition_penalty": 1.0}  # as verl's agent loops say; ``ignore_eos`` they leave out

    async def once(name):
        output = await LLMServerClient.generate(
            client, name, prompt_ids=[5, 6, 7], sampling_params=dict(asked)
        )
        return output.model_dump()

    await adapter.update_weights(
        iter(load_file(f"{model}/model.safetensors").items()), global_steps=10
    )
    found["first"] = await once("a")
    await adapter.release()
    await adapter.resume(["weights"])
    weights = load_file(f"{other}/model.safetensors")

    async def stream():
        for item in weights.items():
            yield item

    await adapter.update_weights(stream(), global_steps=11)
    await adapter.resume(["kv_cache"])
    found["second"] = await once("b")
    try:
        await adapter.update_weights(iter(list(weights.items())[:-1]), global_steps=12)
    except Exception as error:
        found["failed"] = type(error).__name__
    found["third"] = await once("c")

    # A partial rollout: aborted in the middle, and continued with the next weights.
    long = {**asked, "max_tokens": 400}
    task = asyncio.create_task(
        client.generate("d", prompt_ids=[5, 6, 7], sampling_params=dict(long))
    )
    aborted = 0
    while not aborted:
        await asyncio.sleep(0.1)
        aborted = (await replica.servers[0].abort_all_requests.remote())["aborted_count"]
        if not aborted:
            await replica.resume_generation()
    # The client asks for the rest after a second; the engine sleeps then, as in colocate_async.
    await adapter.release()
    await asyncio.sleep(1.5)
    await adapter.resume(["weights"])
    await adapter.update_weights(
        iter(load_file(f"{model}/model.safetensors").items()), global_steps=12
    )
    await adapter.resume(["kv_cache"])
    await replica.resume_generation()
    found["partial"] = (await asyncio.wait_for(task, 60)).model_dump()
    await replica.abort_all_requests(reject_request=True)  # it leaves the rotation
    found["rejected"] = await once("e")
    await replica.resume_generation()
    found["back"] = await once("f")
    # Whom nobody would wake up does not sleep, though verl says so.
    replica.config = replace(config, free_cache_engine=False)
    await replica.sleep()
    replica.config, replica.rollout_mode = config, RolloutMode.STANDALONE
    await replica.sleep()
    found["address"] = replica.server_address
    found["awake"] = await asyncio.wait_for(once("g"), 60)
    del asked["repetition_penalty"]
    found["penalised"] = await once("h")
    found["unmerged"] = await sent_apart(replica)
    found["last"] = await once("h")
    adapter._rollout.shutdown()
    await replica.servers[0].shutdown.remote()
    return found


run(course)
