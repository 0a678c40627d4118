"""Names as vLLM, SGLang and transformers have them: which of ours each is, or what to do instead.

The command line takes the engine's settings under these names; in Python, and in HTTP bodies where
no dialect says otherwise, an unknown name is refused with what is said of it here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isfunction, signature
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
Namer = Callable[[str], str]  # how one of our settings is written where a text is shown
_ALIKE = 0.75  # of difflib: less is another word, and a suggestion that misleads
_LONGEST = 100  # characters of a name that is looked at: what it takes grows with them
_BEGINS = 5  # letters that are enough to know a name by its beginning


def near(name: str, known: Iterable[str], alike: float = _ALIKE) -> str | None:
    """The one of ``known`` that ``name`` is a misspelling or the beginning of; None: of none."""
    if len(name) > _LONGEST:
        return None
    plain = {one.lstrip("-").replace("-", "_").lower(): one for one in known}
    word = name.lstrip("-").replace("-", "_").lower()
    if found := difflib.get_close_matches(word, plain, 1, alike):
        return plain[found[0]]
    begun = [one for one in plain if one.startswith(word)] if len(word) >= _BEGINS else []
    return plain[min(begun, key=len)] if begun else None


_nearest = lru_cache(maxsize=1024)(near)  # requests repeat their names, none as long as a book


def asks_by_zero(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Whether ``value`` is a 0 that says something, by the default of what ``name`` is near to."""
    if value != 0 or not isinstance(value, int | float) or isinstance(value, bool):
        return False
    meant = None if len(name) > _LONGEST else _nearest(name, tuple(defaults))
    return meant is not None and defaults[meant] != 0


def in_python(name: str) -> str:
    return f"{name}="


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spellings:
    """``same``: their name -> ours, or ours and the value that it means. ``refused``: their name ->
    what to do; "{name}" in it is a setting of ours.
    """

    same: Mapping[str, str | tuple[str, Any]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def why_refused(self, name: str, namer: Namer = in_python) -> str | None:
        text = self.refused.get(name)
        return None if text is None else text.format_map(_Named(namer))

    def hint(self, name: str, known: Collection[str]) -> str:
        """What to use for ``name``, which is none of ``known``: goes behind "unknown ...; "."""
        ours = self.same.get(name)
        if isinstance(ours, str) and ours in known:
            return f"here it is {ours!r}"
        if isinstance(ours, tuple) and ours[0] in known:
            return f"here it is {ours[0]}={ours[1]!r}"
        why = self.why_refused(name)
        if why is not None and not (why == _PARAMETER and "source" in known):  # of an update
            return why
        theirs = {key: mine for key, mine in self.same.items() if isinstance(mine, str)}
        theirs = {key: mine for key, mine in theirs.items() if mine in known}
        if (meant := near(name, [*known, *theirs])) is not None:
            return f"did you mean {theirs.get(meant, meant)!r}?"
        return f"known: {', '.join(known)}" if known else "there are none"


class _Named(dict[str, str]):
    def __init__(self, namer: Namer) -> None:
        self._namer = namer

    def __missing__(self, name: str) -> str:
        return self._namer(name)


def explains_names(
    spellings: Spellings, what: str, error: type[Exception]
) -> Callable[[type[T]], type[T]]:
    """Of a dataclass: a keyword that is no field raises ``error``, with a hint, not a TypeError."""

    def decorate(cls: type[T]) -> type[T]:
        made: Any = cls.__init__
        known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]

        @wraps(made)
        def init(self: T, *args: Any, **values: Any) -> None:
            try:
                made(self, *args, **values)
            except TypeError:
                if args:
                    text = f"{what}s are given by name: {cls.__name__}({known[0]}=...)"
                    raise error(text) from None
                _refuse_unknown(values, known, f"unknown {what}", spellings, error)
                raise

        cls.__init__ = init  # type: ignore[assignment, method-assign]
        return cls

    return decorate


def explains_arguments(
    spellings: Spellings, error: type[Exception]
) -> Callable[[type[T]], type[T]]:
    """Of a class: a keyword that a public method does not take raises ``error``, with a hint; and
    a method that others have is an ``AttributeError`` that says what is here instead.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name, held in list(vars(cls).items()):
            found = held.__func__ if isinstance(held, classmethod) else held
            if not name.startswith("_") and isfunction(found):
                known = signature(found).parameters.values()
                if all(one.kind is not one.VAR_KEYWORD for one in known):
                    verb = _explained(found, spellings, error)
                    setattr(cls, name, verb if held is found else classmethod(verb))
        cls.__getattr__ = _no_attribute  # type: ignore[attr-defined]
        return cls

    return decorate


def _refuse_unknown(
    given: Iterable[str], known: list[str], what: str, spellings: Spellings, error: type[Exception]
) -> None:
    for name in given:
        if name not in known:
            raise error(f"{what} {name!r}; {spellings.hint(name, known)}") from None


def _no_attribute(self: Any, name: str) -> NoReturn:
    here = METHODS.get(name)
    hint = "" if here is None else f"; here it is {here}"
    raise AttributeError(f"{type(self).__name__} has no {name!r}{hint}", name=name, obj=self)


def _explained(method: Any, spellings: Spellings, error: type[Exception]) -> Any:
    known = list(signature(method).parameters)[1:]

    @wraps(method)
    def verb(self: Any, /, *args: Any, **given: Any) -> Any:
        try:
            return method(self, *args, **given)
        except TypeError:
            _refuse_unknown(given, known, f"{method.__name__} takes no", spellings, error)
            raise

    @wraps(method)
    async def awaited(self: Any, /, *args: Any, **given: Any) -> Any:
        return await verb(self, *args, **given)

    @wraps(method)
    async def iterated(self: Any, /, *args: Any, **given: Any) -> Any:
        async with aclosing(verb(self, *args, **given)) as items:
            async for item in items:
                yield item

    # Of the same kind still, which Ray's actors and web routes ask for.
    if iscoroutinefunction(method):
        return awaited
    return iterated if isasyncgenfunction(method) else verb


_ALWAYS = "leave it out: it is always so here"
_HEADS = (
    "the architecture says what is served; {task} classify or reward refuses another one at the "
    "start, and embeddings need no setting"
)
_REPLICAS = "use `rollout serve --replicas N`: engines behind one address, updated as one"
_LOADED = (
    "start with {max_adapters} N, and load them by load_lora_adapter (over HTTP "
    "/v1/load_lora_adapter, under a --weight-dir; `rollout serve` has --lora-modules, too)"
)
_NOT_LOGGED = "leave it out: requests are not logged; {journal} DIR keeps what was finished"
_GRAMMARS = "leave it out: grammars are xgrammar's, of the extra structured"
_ORDER = "leave it out: first come is first served"
_DRAFTS = (
    "use {num_speculative_tokens} N: tokens are drafted by prompt lookup (method ngram, by "
    "{prompt_lookup_min} to {prompt_lookup_max} tokens), by a smaller model, by an EAGLE-3 head "
    "(method eagle3), or by the prediction head that the release comes with (method mtp): "
    "{draft_component}"
)
_CAPTURED = "use {cuda_graph_sizes}, the batch sizes to capture, or {cuda_graphs} off"
_ROPE = (
    'use {hf_overrides} {{"rope_parameters": {{...}}}}, with what differs from the checkpoint\'s'
)
_NO_CORS = "the server sends no CORS headers: use a proxy"
_SERVE = "an embedded engine is served by r.serve(host, port, token=...), others by `rollout serve`"

ENGINE = Spellings(
    same={
        "model_path": "model",
        "tokenizer_path": "tokenizer",
        "tp": "tensor_parallel_size",
        "tp_size": "tensor_parallel_size",
        "tensor_parallel": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "pipeline_parallel": "pipeline_parallel_size",
        "enable_expert_parallel": "expert_parallel",
        "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs",
        "chunked_prefill_size": "max_num_batched_tokens",
        "page_size": "block_size",
        "max_loras": "max_adapters",
        "max_loras_per_batch": "max_adapters",
        "num_gpu_blocks_override": "num_kv_blocks",
        "kv_cache_memory_bytes": "kv_cache_bytes",
        "mem_fraction_static": "gpu_memory_utilization",
        "random_seed": "seed",
        "enforce_eager": ("cuda_graphs", "off"),
        "disable_cuda_graph": ("cuda_graphs", "off"),
        "disable_radix_cache": ("enable_prefix_caching", False),
        "enable_deterministic_inference": ("deterministic", True),
        "enable_fp32_lm_head": ("head_dtype", "float32"),
    },
    refused={
        "enable_chunked_prefill": _ALWAYS,
        "enable_sleep_mode": _ALWAYS,
        "enable_memory_saver": _ALWAYS + " (sleep and wake_up need no setting)",
        "weight_transfer_config": _ALWAYS + " (gloo on CPUs, NCCL on GPUs)",
        "no_enable_chunked_prefill": "prompts are always computed in chunks: use "
        "{max_num_batched_tokens}, the most of a step",
        **dict.fromkeys(
            ("enable_log_requests", "no_enable_log_requests", "disable_log_requests"), _NOT_LOGGED
        ),
        "disable_log_stats": "leave it out: figures are at /metrics, not in the log",
        "attention_backend": "leave it out: the device decides",
        "compilation_config": "torch.compile is not used; {cuda_graphs} and {cuda_graph_sizes} say "
        "what is captured",
        **dict.fromkeys(
            ("cuda_graph_bs", "cuda_graph_max_bs", "cudagraph_capture_sizes"), _CAPTURED
        ),
        **dict.fromkeys(
            ("structured_outputs_config", "guided_decoding_backend", "grammar_backend"), _GRAMMARS
        ),
        **dict.fromkeys(("schedule_policy", "scheduling_policy"), _ORDER),
        "skip_server_warmup": "leave it out: no request is made up to warm the server",
        **dict.fromkeys(("rope_scaling", "rope_theta"), _ROPE),
        "max_total_tokens": "use {num_kv_blocks} N, each of {block_size} tokens",
        "uvicorn_log_level": "use `rollout serve --log-level`",
        "data_parallel_size": _REPLICAS,
        "dp": _REPLICAS,
        "dp_size": _REPLICAS,
        "runner": _HEADS,
        "is_embedding": "leave it out: " + _HEADS,
        "convert": "nothing is converted: " + _HEADS,
        "ep_size": "use {expert_parallel}: all ranks share the experts",
        "enable_lora": "use {max_adapters} N and {max_lora_rank} R; without them adapters are "
        "merged, by update_weights(peft_model) or load_lora_adapter (over HTTP "
        "/v1/load_lora_adapter, under a --weight-dir)",
        "lora_modules": _LOADED,
        "lora_paths": _LOADED,
        "enable_auto_tool_choice": "leave it out: `rollout serve --tool-call-parser` alone turns "
        "it on",
        "cpu_offload_gb": "weights are not offloaded; use {tensor_parallel_size}, or {staging} "
        "host",
        "swap_space": "nothing is swapped: preempted requests are computed again",
        "max_logprobs": "leave it out: requests may ask for any number up to the vocabulary",
        "logprobs_mode": "raw and processed logprobs both come with every token; over HTTP "
        "`rollout serve --logprobs-mode` says which is OpenAI's field",
        "hf_config_path": "use {model}, a directory whose config.json is read",
        "generation_config": "leave it out: a checkpoint's sampling defaults never apply silently",
        "distributed_executor_backend": "use {executor} inline, multiprocess or ray",
        "limit_mm_per_prompt": "use {max_images} and {max_videos}, for each prompt",
        **dict.fromkeys(
            (
                *("speculative_config", "speculative_algorithm", "speculative_num_draft_tokens"),
                *("speculative_num_steps", "speculative_eagle_topk", "speculative_model"),
                "speculative_draft_model_path",
            ),
            _DRAFTS,
        ),
        "disable_custom_all_reduce": "leave it out: there is none",
        "allow_credentials": _NO_CORS,
        "allowed_origins": _NO_CORS,
    },
)
# In Python, where an engine has no server of its own.
EMBEDDED = Spellings(
    same=ENGINE.same,
    refused={
        **ENGINE.refused,
        **dict.fromkeys(("host", "port", "grpc_port", "token", "api_key"), _SERVE),
        "config": "its settings are keywords: Rollout(**config.to_dict())",
    },
)


def _grammar(kind: str) -> str:
    return f"use structured_outputs={{{{{kind!r}: ...}}}}"


_ALWAYS_LOGPROBS = "leave it out: logprobs of the sampled tokens always come"

SAMPLING = Spellings(
    same={
        "max_new_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "max_length": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "num_return_sequences": "n",
        "stop_strings": "stop",
        "stop_sequences": "stop",
        "eos_token_id": "stop_token_ids",
        "no_stop_trim": "include_stop_str_in_output",
        "top_logprobs": "logprobs",
        "num_logprobs": "logprobs",
        "lora_path": "adapter",
        "lora_request": "adapter",
    },
    refused={
        "do_sample": "temperature=0 is greedy, any other samples",
        "use_beam_search": "beams are not searched: ask for n samples",
        "num_beams": "beams are not searched: ask for n samples",
        "best_of": "ask for n samples, and choose by cumulative_logprob",
        "length_penalty": "beams are not searched: ask for n samples",
        "logits_processors": "no code of callers runs in the engine: use logit_bias, "
        "allowed_token_ids, bad_words or structured_outputs",
        "extra_args": "no code of callers runs in the engine, which would read them",
        "custom_params": "no code of callers runs in the engine, which would read them",
        "truncate_prompt_tokens": "send what fits",
        "return_logprob": _ALWAYS_LOGPROBS,
        "flat_logprobs": "leave it out: logprobs of the sampled tokens are flat lists",
        "output_kind": "leave it out: generate() gives what is finished, stream() all so far",
        "stop_regex": "use stop, or structured_outputs={{'regex': ...}} for the whole answer",
        "guided_decoding": "use structured_outputs",
        "response_format": 'use structured_outputs={{"json": schema}} or {{"json_object": True}}',
        "json_schema": _grammar("json"),
        "regex": _grammar("regex"),
        "ebnf": _grammar("grammar"),
        **{
            f"guided_{kind}": _grammar(kind)
            for kind in ("json", "regex", "choice", "grammar", "json_object")
        },
    },
)

# Of the verbs that generate: what others pass beside the parameters.
_PARAMETER = "it goes into SamplingParams(...), or a dict of them, behind the prompts"
_IS_PARAMETER = (
    *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos", "structured_outputs", "adapter"),
)
VERBS = Spellings(
    same={
        "prompt": "prompts",
        "inputs": "prompts",
        "text": "prompts",
        "input_ids": "prompts",
        "prompt_token_ids": "prompts",
        "rid": "request_ids",
        "request_id": "request_ids",
        "image_data": "images",
        "multi_modal_data": "images",
        "model": "source",
        "state_dict": "source",
        "weights": "source",
        "named_tensors": "source",
        "path": "server_path",
        "model_path": "server_path",
        "weight_version": "label",
    },
    refused={
        **dict.fromkeys((*_IS_PARAMETER, *SAMPLING.same), _PARAMETER),
        **SAMPLING.refused,
        "use_tqdm": "leave it out: no bar is drawn",
        "lora_request": 'use SamplingParams(adapter="name")',
        "lora_path": 'use SamplingParams(adapter="name")',
        "priority": "first come is first served",
        "stream": "use stream(prompt, params)",
        "timeout": "end it by Ctrl-C, by asyncio.timeout() around AsyncRollout's, or by abort(id)",
        "flush_cache": "leave it out: no cached KV outlives its weights",
        "clear_cache": "call reset_prefix_cache(), which an update does not need",
    },
)

_TOKENIZER = "tokenize(text), or transformers' own of the checkpoint"

# What vLLM's and SGLang's engines have, and what to call here.
METHODS = {
    "close": "shutdown()",
    "encode": "embed(prompts)",
    "is_sleeping": 'metrics().state == "asleep"',
    "get_metrics": "metrics()",
    "health": "server_info()",
    "check_health": "server_info()",
    **dict.fromkeys(("get_tokenizer", "tokenizer"), _TOKENIZER),
    "detokenize": "the text of an output, or decode() of transformers' tokenizer of the checkpoint",
    "llm_engine": "the verbs themselves; for its figures metrics() and server_info()",
    "beam_search": "generate(...) with n samples: beams are not searched",
    "flush_cache": "reset_prefix_cache()",
    "pause": "pause_generation()",
    "resume": "resume_generation()",
    "continue_generation": "resume_generation()",
    "release_memory_occupation": "sleep()",
    "resume_memory_occupation": "wake_up()",
    "load_weights": "update_weights(model)",
    "reload_weights": "update_weights(server_path=DIR)",
    "update_weights_from_disk": "update_weights(server_path=DIR)",
    "update_weights_from_tensor": "update_weights(model)",
    "update_weights_from_distributed": "update_weights(model)",
    "add_lora": "load_lora_adapter(...)",
    "remove_lora": "unload_lora_adapter(...)",
    "abort_request": "abort(request_id)",
    "abort_requests": "abort(request_ids)",
}
