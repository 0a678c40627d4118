"""Flags as vLLM and SGLang spell them: the ones that mean what one of ours means, and the others.

A flag that is in neither list is unknown, and argparse says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout.errors import ConfigError

COMMANDS = ("serve", "generate", "check", "bench", "fleet")  # those that take theirs

# Theirs -> ours; a value that follows stays where it is.
SAME: Mapping[str, tuple[str, ...]] = {
    "--model-path": ("--model",),
    "-tp": ("--tensor-parallel-size",),
    "-q": ("--quantization",),
    "--tp": ("--tensor-parallel-size",),
    "--tp-size": ("--tensor-parallel-size",),
    "--enable-expert-parallel": ("--expert-parallel",),
    "--api-key": ("--token",),
    "--ssl-certfile": ("--tls-cert",),
    "--ssl-keyfile": ("--tls-key",),
    "--ssl-ca-certs": ("--tls-client-ca",),
    "--context-length": ("--max-model-len",),
    "--max-running-requests": ("--max-num-seqs",),
    "--chunked-prefill-size": ("--max-num-batched-tokens",),
    "--page-size": ("--block-size",),
    "--max-loras": ("--max-adapters",),
    "--max-loras-per-batch": ("--max-adapters",),
    "--num-gpu-blocks-override": ("--num-kv-blocks",),
    "--kv-cache-memory-bytes": ("--kv-cache-bytes",),
    "--random-seed": ("--seed",),
    "--tokenizer-path": ("--tokenizer",),
    "--enforce-eager": ("--cuda-graphs", "off"),
    "--disable-cuda-graph": ("--cuda-graphs", "off"),
    "--disable-radix-cache": ("--no-enable-prefix-caching",),
    "--enable-deterministic-inference": ("--deterministic",),
    "--enable-fp32-lm-head": ("--head-dtype", "float32"),
}
DTYPES = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
}  # fmt: skip

_FRACTION = (
    "no fraction of the memory is set here: the KV cache takes what the weights and their shadow "
    "leave free; use --kv-cache-bytes N (of each rank) for another size"
)
_ALWAYS = "leave it out: it is always so here"
_HEADS = (
    "the architecture says what is served; --task classify or --task reward refuses another one at "
    "the start, and embeddings need no flag"
)
_REPLICAS = "use --replicas N: engines behind one address, updated as one"
_LOADED = "start with --max-adapters N, and load them by /v1/load_lora_adapter under a --weight-dir"
_NO_PIPELINE = "there is no pipeline parallelism: use --tensor-parallel-size"
REFUSED: Mapping[str, str] = {
    "--gpu-memory-utilization": _FRACTION,
    "--mem-fraction-static": _FRACTION,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-sleep-mode": _ALWAYS,
    "--weight-transfer-config": _ALWAYS + " (gloo on CPUs, NCCL on GPUs)",
    "--disable-log-requests": "leave it out: requests are not logged",
    "--disable-log-stats": "leave it out: figures are at /metrics, not in the log",
    "--uvicorn-log-level": "use --log-level",
    "-pp": _NO_PIPELINE,
    "--pipeline-parallel-size": _NO_PIPELINE,
    "--pp-size": _NO_PIPELINE,
    "-dp": _REPLICAS,
    "--data-parallel-size": _REPLICAS,
    "--dp": _REPLICAS,
    "--dp-size": _REPLICAS,
    "--runner": _HEADS,
    "--is-embedding": "leave it out: " + _HEADS,
    "--convert": "nothing is converted: " + _HEADS,
    "--ep-size": "use --expert-parallel: all ranks share the experts",
    "--kv-cache-dtype": "the KV cache has the dtype of the model; use --dtype",
    "--enable-lora": "use --max-adapters N --max-lora-rank R; without them adapters are merged, by "
    "update_weights(peft_model), or by /v1/load_lora_adapter under a --weight-dir",
    "--lora-modules": _LOADED,
    "--lora-paths": _LOADED,
    "--enable-auto-tool-choice": "leave it out: --tool-call-parser alone turns it on",
    "--enable-memory-saver": _ALWAYS + " (sleep and wake_up need no flag)",
    "--cpu-offload-gb": "weights are not offloaded; use --tensor-parallel-size, or --staging host",
    "--swap-space": "nothing is swapped: preempted requests are computed again",
    "--max-logprobs": "leave it out: requests may ask for any number up to the vocabulary",
    "--hf-config-path": "use MODEL, a directory whose config.json is read",
    "--generation-config": "leave it out: a checkpoint's sampling defaults never apply silently",
    "--distributed-executor-backend": "use --executor inline or multiprocess",
    "--allow-credentials": "the server sends no CORS headers: use a proxy",
    "--allowed-origins": "the server sends no CORS headers: use a proxy",
}


def respelled(argv: Sequence[str]) -> list[str]:
    """``argv`` in our spelling; raises ``ConfigError`` for a flag that has no meaning here."""
    command = next((word for word in argv if not word.startswith("-")), None)
    if command not in COMMANDS:
        return list(argv)
    found: list[str] = []
    for index, word in enumerate(argv):
        if word == "--":
            return [*found, *argv[index:]]
        flag, equals, value = word.partition("=")
        if word.startswith("-") and flag in REFUSED:
            raise ConfigError(f"{flag} is not a flag of rollout {command}: {REFUSED[flag]}")
        ours = SAME.get(flag, (flag,))
        if found and found[-1] == "--dtype":
            found.append(DTYPES.get(word, word))
        elif not equals:
            found += ours
        elif ours == ("--dtype",):
            found.append(f"--dtype={DTYPES.get(value, value)}")
        else:
            found += [*ours[:-1], f"{ours[-1]}={value}"]
    return found
