"""Engine settings: one frozen, keyword-only tree that refuses unknown keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from rollout.errors import ConfigError, InvalidRequest
from rollout.wire.spellings import EMBEDDED, Spellings, explains_names, near

DEFAULT_TIMEOUT = 30.0  # seconds; every wait without its own deadline
MAX_TIMEOUT = 86400.0  # seconds; the longest wait that anybody may ask for: a day
MAX_INTEGER = (1 << 63) - 1  # of a setting: sys.maxsize, which some write for no bound
DEFAULT_BUCKET_BYTES = 64 << 20
HEAD = "mtp"  # the component that is a release's own head of multi-token prediction
_COMPONENT = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


# As others write a dtype, and what is in a KV cache.
_KV_DTYPES = {
    "int8": "int8_per_token_head",
    **dict.fromkeys(("fp8", "fp8_e4m3", "float8_e4m3fn"), "fp8_per_token_head"),
}
_DTYPES = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
}  # fmt: skip
_SETTING = "engine setting"


def check_known(
    key: Any,
    known: list[str],
    what: str,
    spellings: Spellings = Spellings(),  # noqa: B008
) -> None:
    """Raise a ``ConfigError`` saying what to use when ``key`` is not one of the known ones."""
    if key not in known:
        raise ConfigError(f"unknown {what} {key!r}; {spellings.hint(str(key), known)}")


def timeout_problem(seconds: Any) -> str | None:
    """What is wrong with a timeout that a user gave; None: nothing."""
    shown = repr(seconds)
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        if 0 < seconds <= MAX_TIMEOUT:
            return None
        shown = f"{seconds:g}" if isinstance(seconds, float) else shown
    return f"must be a number of seconds above 0 and at most {MAX_TIMEOUT:g}, got {shown:.80}"


def check_written(what: str, text: str) -> None:
    """``ConfigError`` for what no file and no process can be given as a name or an argument, and
    for an empty text: as a path it would be the working directory.
    """
    if not text.strip():
        raise ConfigError(f"{what} is empty: give it a value, or leave it out")
    try:
        written = b"\0" not in text.encode(errors="surrogateescape")  # as names of files are
    except UnicodeEncodeError:
        written = False
    if not written:
        raise ConfigError(f"{what} has a null byte in it, or is no Unicode text: {text!r:.80}")


def check_timeout(seconds: Any) -> float:
    """A timeout as a request brings it; ``InvalidRequest`` unless it is in (0, MAX_TIMEOUT]."""
    problem = timeout_problem(seconds)
    if problem is not None:
        raise InvalidRequest(f"timeout {problem}")
    return float(seconds)


def _setting(
    default: Any,
    text: str,
    *choices: str,
    least: int | None = None,
    most: int = MAX_INTEGER,
    metavar: str | None = None,
) -> Any:
    """A field with its help text and what it may be: one of ``choices``, or an int from ``least``
    to ``most`` (None too, where that is the default). ``metavar`` is what the flag's help calls
    its value.
    """
    metadata = {"help": text, "choices": choices, "least": least, "most": most, "metavar": metavar}
    return field(default=default, metadata=metadata)


@explains_names(EMBEDDED, _SETTING, ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes are in bytes, times in seconds, lengths in tokens.

    The command line's flags and docs/api.md are made from these fields and their texts.
    """

    model: str = field(
        metadata={"help": "checkpoint directory, hub id or URL (s3://, modelscope:// ...)"}
    )
    revision: str | None = _setting(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = _setting(
        None, "directory or hub id of the tokenizer (default: the model's)"
    )
    tokenizer_revision: str | None = _setting(
        None, "branch, tag or commit of the tokenizer's hub id; without `tokenizer`, of the model's"
    )
    tokenizer_mode: str = _setting(
        "auto",
        "auto (the Rust tokenizer, where it is one) or slow (through transformers' wrapper)",
        *("auto", "slow"),
    )
    chat_template: str | None = _setting(
        None, "chat template: a file, or the template's own text (default: the tokenizer's)"
    )
    skip_tokenizer_init: bool = _setting(False, "serve token ids only")
    served_model_name: str | None = _setting(
        None, "name that clients ask for (default: MODEL as given)"
    )
    device: str = _setting("auto", "auto, cpu or cuda", "auto", "cpu", "cuda")
    dtype: str = _setting(
        "auto",
        "auto (the checkpoint's), float32, bfloat16 or float16",
        *("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = _setting(
        "auto",
        "of keys and values: auto (the model's), int8_per_token_head or fp8_per_token_head (8 bits "
        "and a scale for each token and head)",
        *("auto", "int8_per_token_head", "fp8_per_token_head"),
    )
    load_format: str = _setting(
        "auto",
        "auto, safetensors, fastsafetensors (that package), pt, sharded_state (ranks' own files), "
        "dummy (made-up weights), or what register_loader made known",
    )
    hf_overrides: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "JSON object: fields of config.json to replace, nested ones by nested objects"
        },
    )
    trust_remote_code: bool = _setting(
        False, "run code that lies with the checkpoint (auto_map), which is never run else"
    )
    code_revision: str | None = _setting(
        None, "branch, tag or commit of that code, where it is a hub id's"
    )
    module_map: str | None = _setting(
        None,
        "a Python file or module with MODULE_MAP: architecture, or class of transformers', to the "
        "class in its place (docs/add_a_model.md)",
    )
    worker_extension_cls: str | None = _setting(
        None,
        "FILE.py:Class or module:Class, whose methods every rank runs when collective_rpc calls "
        "them by name (docs/collective_rpc.md)",
    )
    components: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "NAME=DIR: weights that change with the model's in one update, and are not run "
            "(a head's, or a draft model's, but for draft_component): a checkpoint directory; "
            "mtp=DIR of a release: the head that it comes with; may be repeated",
            "metavar": "NAME=DIR",
        },
    )
    executor: str = _setting(
        "auto",
        "auto, inline (one rank, in this process), multiprocess, ray (ranks on any nodes of a Ray "
        "cluster), or external (ranks in a trainer's own processes: Rollout.from_ranks)",
        *("auto", "inline", "multiprocess", "ray", "external"),
    )
    ray_address: str | None = _setting(
        None, "Ray cluster of executor='ray' (default: RAY_ADDRESS, else this machine's)"
    )
    ray_placement_group: str | None = _setting(
        None,
        "of executor='ray': named placement group, with a bundle for each rank (default: one of "
        "the engine's own)",
    )
    tensor_parallel_size: int = _setting(1, "ranks that share the model", least=1)
    pipeline_parallel_size: int = _setting(
        1,
        "stages of a pipeline, each with its part of the layers on tensor_parallel_size ranks",
        least=1,
    )
    expert_parallel: bool = _setting(False, "ranks hold whole experts instead of a part of each")
    max_model_len: int | None = _setting(
        None, "longest sequence in tokens (default: the model's own, if it fits)", least=1
    )
    max_num_seqs: int = _setting(256, "sequences that run at the same time", least=1)
    max_num_batched_tokens: int = _setting(2048, "tokens of one engine step", least=1)
    max_queued_requests: int = _setting(
        16384,
        "sequences (n for each prompt) that may wait; a call beyond it is refused (HTTP 429), but "
        "where none waits any up to max_seqs_per_call is taken",
        least=1,
    )
    max_seqs_per_call: int = _setting(
        1 << 18,
        "sequences (n for each prompt) that one call may bring; more are refused (HTTP 400)",
        least=1,
    )
    block_size: int = _setting(32, "tokens of one KV block", least=1)
    num_kv_blocks: int | None = _setting(
        None, "KV blocks of each rank (default: by kv_cache_bytes, or by memory)", least=1
    )
    kv_cache_bytes: int | None = _setting(
        None,
        "bytes of KV cache of each rank, unless num_kv_blocks is given (default: by memory; on a "
        "CPU at most 4 GiB and a quarter of what is free after the shadow)",
        least=1,
    )
    gpu_memory_utilization: float | None = _setting(
        None,
        "share of a GPU's memory, above 0 and up to 1, for the weights, staging and KV cache of "
        "this engine (default: the KV cache takes nine tenths of what these leave free)",
    )
    state_cache_bytes: int | None = _setting(
        None,
        "bytes of recurrent states of each rank, where the model has them: half for the sequences "
        "that run, the rest for snapshots, and copies to draft by (default: two for each of "
        "max_num_seqs, and one for each that may be drafted for, if they fit)",
        least=1,
    )
    state_snapshot_blocks: int = _setting(
        16, "KV blocks between two snapshots of a sequence's recurrent states", least=1
    )
    enable_prefix_caching: bool = _setting(True, "share the KV blocks of common prefixes")
    max_images: int = _setting(16, "images of one prompt", least=1)
    max_image_pixels: int = _setting(
        1 << 25, "pixels of an image or a frame; a larger one is refused undecoded", least=1
    )
    max_videos: int = _setting(4, "videos of one prompt", least=1)
    max_video_frames: int = _setting(768, "frames of one video", least=1)
    max_video_pixels: int = _setting(
        1 << 29, "pixels of all frames of a video; more are refused undecoded", least=1
    )
    encoder_cache_bytes: int = _setting(
        256 << 20,
        "bytes on each rank for features of what is seen, between engine steps",
        least=1,
    )
    allow_remote_images: bool = _setting(
        False,
        "fetch images and videos that chats name by http(s) URL (default: refuse all but data: "
        "URIs)",
    )
    staging: str = _setting(
        "auto",
        "where an update waits for its commit: auto, device, host or none",
        *("auto", "device", "host", "none"),
    )
    undo: str = _setting(
        "shadow",
        "what a rollback needs is kept as: shadow (until the next update), sparse or host",
        *("shadow", "sparse", "host"),
    )
    weight_layout: str = _setting(
        "auto",
        "how linear weights lie in memory: auto, plain or tiles",
        *("auto", "plain", "tiles"),
    )
    quantization: str = _setting(
        "none",
        "how linear weights are held, whatever checkpoint and trainer have: none, int8, fp8, "
        "fp8_block or mxfp4; auto: as the checkpoint has them",
        *("none", "auto", "int8", "fp8", "fp8_block", "mxfp4"),
    )
    max_adapters: int = _setting(
        0,
        "LoRA adapters that are served unmerged at a time, versions still in use included, so one "
        "that is updated takes two for a moment; 0: loading one merges it into the weights",
        least=0,
    )
    max_cpu_loras: int = _setting(
        0,
        "adapter versions that are held in all, in host memory; those that requests name are "
        "copied to the slots of max_adapters, and the least recently used make room; 0: "
        "max_adapters",
        least=0,
    )
    max_lora_rank: int = _setting(16, "largest rank of those adapters", least=1)
    lora_embeddings: bool = _setting(
        False,
        "adapters may change the embedding and the head, too, whose slots take max_adapters x "
        "max_lora_rank x 2 x (vocabulary + hidden size) elements",
    )
    lora_experts: bool = _setting(
        False,
        "adapters may change routed experts, too, whose slots take max_adapters x max_lora_rank x "
        "(2 x hidden size + 3 x inner size) elements for each expert",
    )
    deterministic: bool = _setting(
        False,
        "the same bits (tokens and logprobs) for a sequence in any batch, cached, cut or "
        "preempted, on 1, 2 or 4 ranks; docs/benchmarks.md has the cost",
    )
    task: str = _setting(
        "auto",
        "what the model has to be for: auto (whatever its architecture says), generate, classify "
        "(it has a score head) or reward (one of one label)",
        *("auto", "generate", "classify", "reward"),
    )
    head_dtype: str = _setting(
        "auto",
        "of the logits and the sums that make them: auto (the model's) or float32",
        *("auto", "float32"),
    )
    seed: int | None = _setting(
        None, "of requests that bring none (default: another at every start)"
    )
    num_threads: int | None = _setting(
        None,
        "CPU threads of each rank (default: cores / ranks), at most 1024",
        least=1,
        most=1024,  # a process that gets no more threads is ended by OpenMP, without an error
    )
    timeout: float = _setting(DEFAULT_TIMEOUT, "seconds that a wait may take")
    start_timeout: float = _setting(600.0, "seconds that loading may take")
    weight_dirs: tuple[str, ...] = _setting(
        (),
        "directory under which the server may read updates itself (--follow, server_path=); may "
        "be repeated",
        metavar="DIR",
    )
    progress: bool = _setting(False, "draw a bar while weights are read")
    trace_load: bool = _setting(
        False,
        "each rank writes a line for each tensor of the checkpoint on stderr: what it read, in "
        "which time, and where it put it",
    )
    max_parallel_loading_workers: int | None = _setting(
        None, "ranks that read the checkpoint at the same time (default: all)", least=1
    )
    journal: str | None = _setting(
        None,
        "directory for a journal of finished requests, which `rollout replay` runs again",
        metavar="DIR",
    )
    journal_bytes: int = _setting(
        1 << 30, "bytes of all files of that directory's journal: the oldest go", least=1
    )
    cuda_graphs: str = _setting(
        "auto",
        "capture decode steps on a GPU: auto, on, off, or forward (as auto, without the sampler)",
        *("auto", "on", "off", "forward"),
    )
    cuda_graph_sizes: tuple[int, ...] = _setting(
        (), "batch size to capture; may be repeated (default: some up to max_num_seqs)"
    )
    cuda_graph_prefill: int = _setting(
        512, "tokens up to which steps with prompts are captured as well; 0 for none", least=0
    )
    async_scheduling: bool | None = _setting(
        None,
        "give the ranks step N+1 while N runs, as long as all that run decode and nobody can be "
        "admitted; what arrives, is aborted or commits may wait for two steps then (default: on a "
        "GPU)",
    )
    num_speculative_tokens: int = _setting(
        0,
        "tokens that a step may draft for each sequence and verify at once, by prompt lookup "
        "(n-grams), a draft model or a head; tokens and logprobs are those that come "
        "without; 0: none (docs/speculative_decoding.md)",
        least=0,
        most=64,
    )
    draft_component: str | None = _setting(
        None,
        "name of the component that drafts these tokens: a smaller whole model with the same "
        "tokenizer, or an EAGLE-3 head of the model; or mtp, the head that the model's release "
        "comes with (default: prompt lookup)",
    )
    prompt_lookup_min: int = _setting(
        2, "fewest last tokens of a sequence that are looked up for a draft", least=1
    )
    prompt_lookup_max: int = _setting(4, "most of them", least=1, most=64)
    speculative_max_num_seqs: int | None = _setting(
        None,
        "sequences that decode in a step above which none is drafted for: their own tokens keep "
        "the device busy (default: 8 on a CPU, 32 on a GPU)",
        least=1,
    )
    speculative_history_tokens: int = _setting(
        0,
        "newest tokens of samples that have ended which are kept to draft from when their prompts "
        "come again, as in the next epoch; each takes about 400 bytes of the host's memory",
        least=0,
    )
    max_staleness: int | None = _setting(
        None,
        "versions that a sample's oldest token may lie behind the live one while it is sampled, of "
        "requests that do not say (default: any number)",
        least=0,
    )
    on_stale: str = _setting(
        "recompute",
        "what becomes of a sample beyond it: recompute (its KV), finish (with what it has) or "
        "abort; of requests that do not say",
        *("recompute", "finish", "abort"),
    )
    check_finite: bool = _setting(
        True,
        "refuse updates whose weights hold NaN or infinity, warn of such checkpoints",
    )

    def __post_init__(self) -> None:
        self._normalise()
        self._check_bounds()
        self._check_values()
        self._check_together()

    def _normalise(self) -> None:
        """Each setting in the one form that others read."""

        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("components", _components(self.components))
        if isinstance(self.cuda_graphs, bool):
            put("cuda_graphs", "on" if self.cuda_graphs else "off")
        for f in fields(self):
            if f.type in ("str", "str | None"):
                put(f.name, _text(f.name, getattr(self, f.name)))
        if self.draft_component == HEAD and HEAD not in self.components:
            put("components", {**self.components, HEAD: self.model})  # the release's own
        if self.quantization is None:  # as vLLM has it
            put("quantization", "auto")
        dirs = [_text("weight_dirs", path) for path in _several("weight_dirs", self.weight_dirs)]
        put("weight_dirs", tuple(dirs))
        sizes = _several("cuda_graph_sizes", self.cuda_graph_sizes)
        if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
            raise ConfigError(f"cuda_graph_sizes must be positive integers, got {sizes}")
        put("cuda_graph_sizes", tuple(sorted(set(sizes))))

    def _check_values(self) -> None:
        """What the table has no words for."""
        if not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(f"hf_overrides must be a dict, got {self.hf_overrides!r:.80}")
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(
                f"async_scheduling must be True, False or None, got {self.async_scheduling!r:.80}"
            )
        if self.seed is not None and type(self.seed) is not int:
            raise ConfigError(f"seed must be an integer or None, got {self.seed!r}")
        for name in ("timeout", "start_timeout"):
            if problem := timeout_problem(getattr(self, name)):
                raise ConfigError(f"{name} {problem}")
        share = self.gpu_memory_utilization
        if share is not None and (type(share) not in (int, float) or not 0 < share <= 1):
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {share!r:.80}"
            )

    def _check_together(self) -> None:
        """Settings that do not go with others, or not without them."""
        if self.code_revision is not None and not self.trust_remote_code:
            raise ConfigError(
                f"code_revision={self.code_revision!r} is of code that is run with "
                "trust_remote_code=True alone: set that, too, or leave it out"
            )
        if (
            0 < self.max_cpu_loras < self.max_adapters
            or self.max_cpu_loras > self.max_adapters == 0
        ):
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} with max_adapters={self.max_adapters}: "
                "max_adapters of 1 or more are the slots on the device, and max_cpu_loras counts "
                "all that are held, those in slots too: set it to max_adapters or more"
            )
        for name in ("lora_embeddings", "lora_experts"):
            if getattr(self, name) and not self.max_adapters:
                raise ConfigError(
                    f"{name}=True is of adapters that are served unmerged: set max_adapters, too, "
                    "or leave it out (merged adapters may change these without it)"
                )
        if (draft := self.draft_component) is not None:
            if draft not in self.components:
                raise ConfigError(
                    f"draft_component={draft!r} is none of components "
                    f"({', '.join(self.components) or 'there are none'}): add {draft}=DIR to them, "
                    f"or name {HEAD!r}, the head that the model's release comes with"
                )
            if not self.num_speculative_tokens or self.speculative_history_tokens:
                raise ConfigError(
                    f"draft_component={draft!r} drafts num_speculative_tokens, of 1 or more, and "
                    "looks up no history: set that, and leave speculative_history_tokens out"
                )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above prompt_lookup_max="
                f"{self.prompt_lookup_max}: runs of tokens are looked up from the longest to the "
                "shortest"
            )
        if self.executor == "inline" and self.num_ranks > 1:
            raise ConfigError(
                "executor='inline' runs one rank; use executor='multiprocess' for "
                f"tensor_parallel_size={self.tensor_parallel_size}, pipeline_parallel_size="
                f"{self.pipeline_parallel_size}"
            )

    def _check_bounds(self) -> None:
        """What the table says of each field: its type, its choices and its least value."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{f.name} must be True or False, got {value!r:.80}")
            choices, least = f.metadata.get("choices"), f.metadata.get("least")
            if choices and value not in choices:
                raise ConfigError(
                    f"{f.name} must be one of {', '.join(choices)}, got {value!r:.80}"
                    + _meant(f.name, value, choices)
                )
            if least is None or (value is None and f.default is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                kind = "a positive integer" if least else "an integer, 0 or more"
                raise ConfigError(f"{f.name} must be {kind}, got {value!r:.80}")
            if value > (most := f.metadata["most"]):
                raise ConfigError(f"{f.name} must be at most {most}, got {value!r:.80}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; an unknown key is refused with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            check_known(key, known, _SETTING, EMBEDDED)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def resolved_executor(self) -> str:
        if self.executor != "auto":
            return self.executor
        return "inline" if self.num_ranks == 1 else "multiprocess"

    def runs_ahead(self, device_type: str) -> bool:
        """Whether ranks on devices of this type get step N+1 while N runs."""
        return device_type == "cuda" if self.async_scheduling is None else self.async_scheduling

    def max_drafting(self, device_type: str) -> int:
        """Most sequences of a step that are drafted for, on devices of this type."""
        return self.speculative_max_num_seqs or (32 if device_type == "cuda" else 8)

    @property
    def resolved_num_threads(self) -> int:
        return self.num_threads or max(1, (os.cpu_count() or 1) // self.num_ranks)


def _meant(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """What to use for a value that is none of ``choices``; "" where that is not known."""
    word = str(value)
    if name == "device" and word.startswith("cuda:"):
        return ": rank N takes the N-th GPU that CUDA_VISIBLE_DEVICES shows"
    if name == "device":
        return ": a GPU is 'cuda'" if word == "gpu" else ""
    if name == "dtype" and word.startswith(("fp8", "float8", "int8", "int4", "mxfp4")):
        return ": weights in fewer bits are a matter of quantization"
    if near_one := near(word, choices):
        return f"; did you mean {near_one!r}?"
    if name == "quantization":
        return ": how weights are held; what files are in is seen from them, and kept by 'auto'"
    return ""


def _text(name: str, value: Any) -> Any:
    """A setting that is a text, also of a path, a torch dtype or a torch device; None: not set."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    dtypes = ("dtype", "head_dtype", "kv_cache_dtype")
    if name in (*dtypes, "device") and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    if isinstance(value, EngineConfig):
        raise ConfigError(f"{name} is a text; settings are keywords: Rollout(**config.to_dict())")
    if not isinstance(value, str | None) or (value is None and name in ("model", "load_format")):
        if name == "model" and hasattr(value, "state_dict"):
            raise ConfigError(
                f"model must be a checkpoint directory or hub id, not a {type(value).__name__}: "
                "start from its checkpoint (save_pretrained), then send it by update_weights"
            )
        raise ConfigError(f"{name} must be a text, got {value!r:.80}")
    if value is not None:
        check_written(name, value)
    known = _KV_DTYPES if name == "kv_cache_dtype" else _DTYPES
    return known.get(value, value) if name in dtypes and value else value


def _several(name: str, given: Any) -> tuple[Any, ...]:
    """A setting that is a list, of one where it is a single text, path or number."""
    if isinstance(given, str | os.PathLike | int):
        return (given,)
    try:
        return tuple(given)
    except TypeError:
        raise ConfigError(f"{name} must be a list, got {given!r:.80}") from None


def _components(given: Any) -> dict[str, str]:
    """Name -> directory of what is served beside the model; ``ConfigError`` for what is neither."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"components must map names to directories, got {given!r:.80}")
    for name, path in given.items():
        if not isinstance(name, str) or not _COMPONENT.fullmatch(name) or name == "policy":
            raise ConfigError(
                f"{name!r} cannot name a component: letters, digits, _ and -, a letter first, and "
                "not 'policy', which is the model itself"
            )
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ConfigError(f"component {name!r} needs a checkpoint directory, got {path!r:.80}")
    return {name: os.fspath(path) for name, path in given.items()}
