"""A platform of verl's registry for CPUs, which verl itself has none of; VERL_PLATFORM=cpu.

Its accelerators are what Ray is told to be GPUs, its "device module" torch.cpu with the
few memory figures that verl logs. verl names gloo twice where the device is a CPU, and wants a TRL
that is older than this repository's.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from verl.models.transformers import monkey_patch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        get_device_name=lambda *_: "CPU",
        is_available=lambda: True,
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        current_device=lambda: torch.device("cpu"),
        set_device=lambda _: None,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        reset_peak_memory_stats=lambda *_: None,
        mem_get_info=lambda *_: (1 << 30, 1 << 30),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, num_gpus):
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def overrides(model):
    """For two FSDP2 ranks and engines of float32 on CPUs."""
    return f"""
actor_rollout_ref.model.path={model}
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.dtype=float32
+actor_rollout_ref.actor.fsdp_config.mixed_precision={{param_dtype:fp32}}
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.actor.optim.lr=0.001
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.max_num_seqs=8
actor_rollout_ref.rollout.max_num_batched_tokens=256
actor_rollout_ref.rollout.tensor_model_parallel_size=1
+actor_rollout_ref.rollout.engine_kwargs.rollout.device=cpu
+actor_rollout_ref.rollout.engine_kwargs.rollout.num_threads=1
++actor_rollout_ref.rollout.engine_kwargs.rollout.num_kv_blocks=64
""".split()  # fmt: skip


def documented():
    """The lines of the page that a user adds."""
    page = Path(__file__).parents[2] / "docs" / "frameworks" / "verl.md"
    lines = [line.strip() for line in page.read_text().splitlines() if line.startswith("    ")]
    found = [line for line in lines if line.lstrip("+").startswith("actor_rollout_ref.rollout.")]
    assert len(found) == 5, found
    return found


def _formed(backend=None, *arguments, **options):
    return _form("gloo" if "gloo" in (backend or "") else backend, *arguments, **options)


torch.set_num_threads(1)
monkey_patch.is_trl_available = lambda: False
_form = torch.distributed.init_process_group
if _form.__name__ != _formed.__name__:  # in some processes verl imports this twice
    torch.distributed.init_process_group = _formed
