"""Requests as the sources of clients send them that cannot run here, in their order.

No client ran: each list was written down from the code that is named, (method, path, query, body,
what is looked for in the answer).
"""

from __future__ import annotations

from typing import Any

Request = tuple[str, str, dict[str, Any], Any, dict[str, Any]]

# SkyRL 0.4.0 (Python 3.12, a CUDA trainer): remote_inference_client.py and weight_sync/
# control_plane.py; of a step without its broadcasts.
SKYRL: list[Request] = [
    ("GET", "/get_world_size", {}, None, {"world_size": 1}),
    (
        "POST", "/inference/v1/generate", {},
        {"model": "tiny", "token_ids": [5, 6, 7],
         "sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
                             "min_p": 0.0, "logprobs": 1, "ignore_eos": True,
                             "include_stop_str_in_output": True, "skip_special_tokens": True}},
        {"choices.0.finish_reason": "length"},
    ),
    ("POST", "/detokenize", {}, {"model": "tiny", "tokens": [5, 6, 7]}, {}),
    ("POST", "/tokenize", {}, {"model": "tiny", "prompt": "Hi", "add_special_tokens": True}, {}),
    (
        "POST", "/inference/v1/generate", {},  # its Tinker server's sample()
        {"model": "tiny", "token_ids": [5, 6, 7],
         "sampling_params": {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 0,
                             "max_tokens": 2, "temperature": 0.7}},
        {"prompt_logprobs.0": None, "choices.1.index": 1},
    ),
    ("POST", "/finish_session", {"session_id": "3"}, None, {}),
    ("POST", "/pause", {"mode": "keep", "clear_cache": "false"}, {}, {"status": "paused"}),
    ("POST", "/collective_rpc", {},
     {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": True}}, {}),
    ("POST", "/collective_rpc", {},
     {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["weights"]}}, {}),
    ("POST", "/collective_rpc", {},
     {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["kv_cache"]}}, {}),
    ("POST", "/reset_prefix_cache", {}, {"reset_running_requests": False}, {}),
    ("POST", "/resume", {}, {}, {"status": "resumed"}),
    ("GET", "/is_sleeping", {}, None, {"is_sleeping": False}),
]  # fmt: skip

# SkyRL 0.4.0 with weight_sync_backend=delta: weight_sync/delta_trainer.py, what it sends before it
# pauses. It raises on a status from 400 on, with the error's message (control_plane.py).
SKYRL_DELTA: list[tuple[str, dict[str, Any]]] = [
    (
        "/init_weight_transfer_engine",
        {"init_info": {"base_model_path": "Qwen/Qwen3-0.6B", "local_checkpoint_dir": "/tmp/local",
                       "cloud_download_workers": 4,
                       "checkpoint_load_format": "vllm_multi_thread_safetensors",
                       "multi_thread_safetensors_max_workers": 8}},
    ),
    ("/fetch_weights", {"target_version": 1, "sync_dir": "/tmp/sync",
                        "uri": "/tmp/sync/delta-00000001"}),
]  # fmt: skip


def prime_rl(weight_dir: str) -> list[Request]:
    """prime-rl 0.8.0 (git only, Python 3.12): utils/client.py, with its transport over files."""
    return [
        ("GET", "/health", {}, None, {}),
        ("GET", "/v1/models", {}, None, {"data.0.id": "tiny"}),
        ("POST", "/pause", {"mode": "keep", "clear_cache": "false"}, None, {"status": "paused"}),
        ("POST", "/update_weights", {}, {"weight_dir": weight_dir}, {"status": "ok", "version": 1}),
        ("POST", "/update_weights", {}, {"weight_dir": weight_dir}, {"status": "ok", "version": 1}),
        ("POST", "/resume", {}, None, {"status": "resumed"}),
    ]
