"""Bodies and answers of SGLang's ``/generate``; plain functions over plain values.

Fields, defaults and ``meta_info`` are those of SGLang 0.5.23. A field that could change the output
and is not served is refused by name; one that could not is taken and has no effect.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.errors import InvalidRequest
from rollout.generation import NAN_LOGITS, Completion, PromptInput, RequestOutput, SamplingParams
from rollout.server.http.finite import finite
from rollout.server.http.openai.answers import TokenText, with_top
from rollout.server.http.openai.side_channels import sglang_experts, sglang_mask
from rollout.server.http.openai.types import MAX_FIELDS, RequestId
from rollout.wire.spellings import asks_by_zero, near

NOT_NUMBERS = "its logits were not numbers; the server's log says why"
MAX_NEW_TOKENS = 128  # where a request says nothing
TokenIds = list[Annotated[int, Field(ge=0)]]
Triple = list[float | int | str | None]  # [logprob, token id, its text or None]

# SGLang's name -> ours; None: it cannot change the tokens, and is taken without effect.
_SAMPLING: Mapping[str, str | None] = {
    **{name: name for name in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "n", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
        "logit_bias", "stream_interval",
    )},
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "spaces_between_special_tokens": None,
}  # fmt: skip
_DEFAULTS = {
    name: getattr(SamplingParams(), ours) for name, ours in _SAMPLING.items() if ours is not None
}
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar",
             "structural_tag": "structural_tag"}  # fmt: skip
ANY_JSON = "$$ANY$$"  # SGLang's schema for whatever is JSON
_NO_SAMPLING = ("stop_regex", "beam_width", "custom_params", "watermark")
_WITHOUT_EFFECT = frozenset((
    "session_id", "log_metrics", "conversation_id", "routing_key", "routed_dp_rank",
    "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "priority", "modalities",
    "no_logs", "custom_labels", "received_time", "external_trace_header", "background",
    "use_audio_in_video", "model", "return_text_in_logprobs",
))  # fmt: skip
_NOT_SERVED = (
    "input_embeds", "image_data", "video_data", "audio_data", "token_ids_logprob",
    "return_hidden_states", "return_entropy",
    "return_indexer_topk", "session_params", "custom_logit_processor", "watermark",
    "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs",
    "positional_embed_overrides", "bootstrap_host", "require_reasoning", "max_thinking_tokens",
)  # fmt: skip


class GenerateBody(BaseModel):
    """``/generate``: one prompt, or a list of them with one value for all or one each."""

    model_config = ConfigDict(extra="ignore", strict=True)

    rid: RequestId | list[RequestId] | None = None
    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    lora_path: str | list[str | None] | None = None  # the name of a loaded adapter
    return_text_in_logprobs: bool = False
    return_sampling_mask: bool | list[bool] = False
    return_routed_experts: bool | list[bool] = False
    routed_experts_start_len: int | list[int] = 0
    return_prompt_token_ids: bool = False
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _served(cls, values: Any) -> Any:
        """Refuse what is not served; nulls, falses and empty lists ask for nothing."""
        if not isinstance(values, dict):
            return values
        known = set(cls.model_fields) | _WITHOUT_EFFECT
        for key, value in values.items():
            if key not in known and _asks(value):
                raise ValueError(_refusal(str(key), [*known, *_NOT_SERVED], _NOT_SERVED))
        return {key: value for key, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("exactly one of 'text' and 'input_ids' must be given")
        return self

    @property
    def is_batch(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]

    def asks(self) -> list[Ask]:
        """One for each prompt; raises ``InvalidRequest``."""
        given: Any = self.text if self.text is not None else self.input_ids
        prompts = list(given) if self.is_batch else [given]
        if not prompts or prompts == [[]]:
            raise InvalidRequest("the request has no prompt: text or input_ids must not be empty")
        count = len(prompts)
        _check_fields(self.sampling_params)
        columns = {
            name: self._each(name, count)
            for name in ("sampling_params", "return_logprob", "logprob_start_len",
                         "top_logprobs_num", "lora_path", "return_routed_experts",
                         "routed_experts_start_len", "return_sampling_mask")
        }  # fmt: skip
        rows = zip(prompts, self._rids(count), *columns.values(), strict=True)
        return [_ask(*row) for row in rows]

    def _each(self, name: str, count: int) -> list[Any]:
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * count
        if not self.is_batch or len(value) != count:
            raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts: give 1")
        return value

    def _rids(self, count: int) -> list[str]:
        if isinstance(self.rid, list) or not self.is_batch:
            given = [self.rid or uuid.uuid4().hex] if isinstance(self.rid, str | None) else self.rid
            if len(given) != count:
                raise InvalidRequest(f"rid has {len(given)} entries for {count} prompts")
            return given
        prefix = self.rid or uuid.uuid4().hex
        return [f"{prefix}_{index}" for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt of a call; ``start``: of the prompt's logprobs, -1 for none.

    ``prefill_only``: no new token was asked for. The one that is made where the prompt is not
    scored is not told.
    """

    rid: str
    prompt: PromptInput
    params: SamplingParams
    logprobs: bool
    start: int
    top: int
    prefill_only: bool


def _ask(
    prompt: PromptInput,
    rid: str,
    sampling: Mapping[str, Any],
    logprobs: bool,
    start: int,
    top: int,
    adapter: str | None,
    experts: bool,
    experts_start: int,
    mask: bool,
) -> Ask:
    values = _sampling(sampling) | {"adapter": adapter or None}
    if mask:
        values["return_sampling_mask"] = True
    if experts:
        values |= {"return_routed_experts": True, "routed_experts_prompt_start": experts_start}
    prefill_only = values["max_tokens"] == 0
    if prefill_only:
        values["max_tokens"] = 1
    if start < -1 or (not isinstance(prompt, str) and start > len(prompt)):
        raise InvalidRequest(
            f"logprob_start_len must be -1, or at most the prompt's length, got {start}"
        )
    if logprobs:
        values["logprobs"] = top
        if start >= 0:
            values |= {"prompt_logprobs": top, "prompt_logprobs_start": start}
        plain = values.get("n", 1) == 1 and "structured_outputs" not in values
        if start >= 0 and prefill_only and plain:
            values |= {"max_tokens": 0, "logprobs": None}
    params = SamplingParams.from_dict(values)
    if not params.greedy:
        params = with_top(params, "tempered")
    return Ask(
        rid=rid, prompt=prompt, params=params, logprobs=logprobs, start=start if logprobs else -1,
        top=top, prefill_only=prefill_only,
    )  # fmt: skip


def _check_fields(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Of all prompts together, each name once: those that are unknown are compared with others."""
    names = set(given) if isinstance(given, Mapping) else set().union(*given)
    if len(names) > MAX_FIELDS:
        raise InvalidRequest(f"sampling_params has {len(names)} fields; at most {MAX_FIELDS}")


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"max_tokens": MAX_NEW_TOKENS}
    for key, value in given.items():
        if key in _GRAMMARS:
            values |= _grammar(key, value) if value else {}
        elif key not in _SAMPLING:
            if _asks(value) or asks_by_zero(key, value, _DEFAULTS):
                known = [*_SAMPLING, *_GRAMMARS, *_NO_SAMPLING]
                text = _refusal(key, known, _NO_SAMPLING)
                raise InvalidRequest(f"sampling_params: {text}")
        elif (name := _SAMPLING[key]) is not None and (value is not None or name == "max_tokens"):
            values[name] = value
    if isinstance(ids := values.get("stop_token_ids"), list):  # slime's may have a null in it
        values["stop_token_ids"] = [t for t in ids if t is not None]
    return values


def _grammar(key: str, value: Any) -> dict[str, Any]:
    one = {"json_object": True} if value == ANY_JSON else {_GRAMMARS[key]: value}
    return {"structured_outputs": one}


def _asks(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_asks, value))
    return bool(value)


def _refusal(key: str, known: Sequence[str], named: Sequence[str]) -> str:
    if key in named:
        return f"{key} is not served here: leave it out"
    meant = near(key, known)
    return f"unknown field {key!r}" + (f"; did you mean {meant!r}?" if meant else "")


# ---- answers ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """How versions read: by their labels, where they have one, else by their number."""

    live: int
    labels: Mapping[int, str | None]

    def name(self, version: int) -> str:
        return self.labels.get(version) or str(version)


def replies(
    output: RequestOutput, ask: Ask, versions: Versions, text: TokenText | None
) -> Iterator[dict[str, Any]]:
    """One document for each sample; ``text`` names a token in logprobs, None leaves it out."""
    for completion in output.outputs:
        made = [] if ask.prefill_only else completion.token_ids
        yield {
            "text": "" if ask.prefill_only else completion.text,
            "output_ids": made,
            "meta_info": _meta_info(output, completion, ask, versions, text),
        }


def _meta_info(
    output: RequestOutput,
    completion: Completion,
    ask: Ask,
    versions: Versions,
    text: TokenText | None,
) -> dict[str, Any]:
    stop = 0 if ask.prefill_only else len(completion.token_ids)
    spans = [
        {"version": versions.name(s.version), "start": s.start, "end": min(s.stop, stop)}
        for s in completion.weight_versions
    ]
    several = len(output.outputs) > 1 or ask.params.n > 1
    meta: dict[str, Any] = {
        "id": f"{ask.rid}_{completion.index}" if several else ask.rid,
        "finish_reason": _finish_reason(completion, stop),
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": stop,
        "cached_tokens": output.num_cached_tokens,
        "epoch": output.epoch,
        "weight_version": spans[-1]["version"] if spans else _prefilled_by(completion, versions),
        "weight_versions": spans,
        "staleness": completion.staleness,
        **({"adapter": completion.adapter} if completion.adapter else {}),
        "num_retractions": 0,
    }
    if completion.routed_experts is not None:
        meta["routed_experts"] = sglang_experts(output, completion)
    meta |= sglang_mask(completion, stop)
    if ask.logprobs:
        meta |= _logprobs(output, completion, ask, text, stop)
    return meta


def _prefilled_by(completion: Completion, versions: Versions) -> str:
    spans = completion.kv_spans
    return versions.name(spans[-1].version if spans else versions.live)


def _finish_reason(completion: Completion, made: int) -> dict[str, Any] | None:
    reason = completion.finish_reason
    if reason is None:
        return None
    if reason == "stop":
        matched = completion.stop_reason
        return {"type": "stop", "matched": completion.token_ids[-1] if matched is None else matched}
    if reason == "length":
        return {"type": "length", "length": made}
    if completion.stop_reason == NAN_LOGITS:
        failed = {"message": NOT_NUMBERS, "status_code": 500, "err_type": NAN_LOGITS}
        return {"type": "abort", **failed}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _logprobs(
    output: RequestOutput, completion: Completion, ask: Ask, text: TokenText | None, stop: int
) -> dict[str, Any]:
    def triple(value: float | None, token: int) -> Triple:
        told = None if value is None else finite(value)
        return [told, token, None if text is None else text(token)]

    def ranked(row: Mapping[int, float]) -> list[Triple]:
        best = sorted(row.items(), key=lambda item: -item[1])[: ask.top]
        return [triple(value, token) for token, value in best]

    pairs: list[tuple[dict[int, float] | None, int]] = []
    found, ids = output.prompt_logprobs, output.prompt_token_ids
    if output.scores is not None:
        found = output.scores.rows(ids)[: len(ids)]
    if ask.start >= 0 and found is not None:
        pairs = list(zip(found, ids, strict=False))[ask.start :]
    values = _reported(completion, greedy=ask.params.greedy)[:stop]
    meta: dict[str, Any] = {
        "input_token_logprobs": [triple(row[t] if row else None, t) for row, t in pairs],
        "output_token_logprobs": [
            triple(v, t) for v, t in zip(values, completion.token_ids[:stop], strict=True)
        ],
        "output_token_logprobs_length": stop,
    }
    if ask.top:
        meta["input_top_logprobs"] = [ranked(row) if row else None for row, _ in pairs]
        meta["output_top_logprobs"] = [ranked(r) for r in (completion.logprobs.top or [])[:stop]]
    return meta


def _reported(completion: Completion, *, greedy: bool) -> list[float]:
    """SGLang's: of the tempered logits before the filters, and of the plain ones if greedy."""
    found = completion.logprobs
    if greedy:
        return found.raw
    return [p + kept for p, kept in zip(found.processed, found.log_kept_mass, strict=True)]
