"""Nouns of generation to and from their protobuf messages; what goes out comes back equal.

Logprobs travel as packed float32, everything else unchanged. A value that a field cannot hold (an
integer over 64 bits, a string that is no Unicode) is an ``InvalidRequest`` on the side that sends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import InvalidRequest, TransferFailed
from rollout.generation import (
    AnyPrompt,
    ChatOptions,
    Completion,
    ContinuedPrompt,
    Labels,
    Logprobs,
    PackedScores,
    RequestOutput,
    SamplingMask,
    SamplingParams,
    VersionSpan,
    Video,
    VideoFile,
    VisualPrompt,
    Visuals,
    parts_of,
)
from rollout.generation.metrics import EngineStats, HistogramSnapshot
from rollout.rpc import rollout_pb2 as pb
from rollout.wire.version import ServerInfo

_EXPERTS = ("uint8", "int16")
Messages = Sequence[Mapping[str, Any]]  # one conversation: {"role": ..., "content": ...}


def params_to_proto(params: SamplingParams) -> Any:
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    given = {f.name: values[f.name] for f in fields(params) if values[f.name] != f.default}
    try:
        return pb.SamplingParams(json=json.dumps(given, ensure_ascii=False).encode())
    except ValueError as error:
        raise InvalidRequest(f"a sampling parameter has no wire form: {error}") from error


def params_from_proto(message: Any) -> SamplingParams:
    try:
        values = json.loads(message.json or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"params are not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequest("params must be a JSON object of the fields of SamplingParams")
    return SamplingParams.from_dict(values)


def prompt_to_proto(prompt: AnyPrompt, request_id: str) -> Any:
    given, shown, delivered = parts_of(prompt)
    begun = map(_completion_to_proto, delivered)
    videos = map(_video_to_proto, shown.videos)
    rest = {"request_id": request_id, "images": shown.images, "videos": videos, "delivered": begun}
    try:
        if isinstance(given, str):
            return pb.Prompt(text=given, **rest)
        return pb.Prompt(token_ids=pb.TokenIds(ids=given), **rest)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"prompt of request {request_id}: {error}") from error


def prompt_from_proto(message: Any) -> AnyPrompt:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("a prompt needs `text` or `token_ids`")
    given = str(message.text) if kind == "text" else list(message.token_ids.ids)
    videos = tuple(map(_video_from_proto, message.videos))
    shown = Visuals(images=tuple(message.images), videos=videos)
    prompt = VisualPrompt(given, shown) if shown else given
    if not message.delivered:
        return prompt
    if isinstance(prompt, str):
        raise InvalidRequest("a prompt that is continued is one of token ids, or shows something")
    whole = prompt if isinstance(prompt, VisualPrompt) else tuple(prompt)
    return ContinuedPrompt(whole, delivered_from_proto(message))


def _video_to_proto(video: Video | VideoFile) -> Any:
    if isinstance(video, VideoFile):
        return pb.Video(file=pb.VideoFile(**asdict(video)))
    return pb.Video(frames=video.frames, times=video.times, rate=video.rate)


def _video_from_proto(message: Any) -> Video | VideoFile:
    if message.HasField("file"):
        given = {field.name: value for field, value in message.file.ListFields()}
        return VideoFile.of(given.pop("data", b""), given, "a video")
    times, rate = tuple(message.times), message.rate
    if len(times) != len(message.frames) or not 0 < rate < math.inf:
        raise InvalidRequest("a video needs a time for each frame, and a rate above 0")
    return Video(frames=tuple(message.frames), times=times, rate=rate)


def delivered_from_proto(message: Any) -> tuple[Completion, ...]:
    """Of a prompt, or a conversation; raises ``InvalidRequest``."""
    try:
        return tuple(map(_completion_from_proto, message.delivered))
    except TransferFailed as error:
        raise InvalidRequest(f"what was delivered of a request: {error}") from error


def conversation_to_proto(
    messages: Messages, request_id: str, delivered: Sequence[Completion] = ()
) -> Any:
    return pb.Conversation(
        messages_json=messages_to_json(messages), request_id=request_id,
        delivered=map(_completion_to_proto, delivered),
    )  # fmt: skip


def messages_to_json(messages: Messages) -> bytes:
    try:
        return json.dumps([dict(m) for m in messages]).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"messages must be a list of JSON objects: {error}") from error


def messages_from_json(data: bytes) -> list[dict[str, Any]]:
    try:
        messages = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"messages_json is not JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest('messages_json must be a list of {"role", "content"} objects')
    return messages


def chat_options_to_json(options: ChatOptions) -> bytes:
    given = options.to_dict()
    try:
        return json.dumps(given).encode() if given else b""
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"options of a chat must be JSON: {error}") from error


def chat_options_from_json(data: bytes) -> dict[str, Any]:
    """The fields of ``ChatOptions`` that were given."""
    try:
        values = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"options_json is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequest("options_json must be a JSON object of the fields of ChatOptions")
    return values


def output_to_proto(output: RequestOutput) -> Any:
    return pb.RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=_tops_to_proto(output.prompt_logprobs or ()),
        has_prompt_logprobs=output.prompt_logprobs is not None,
        outputs=[_completion_to_proto(c) for c in output.outputs],
        finished=output.finished,
        num_cached_tokens=output.num_cached_tokens,
        epoch=output.epoch,
        hidden_state=output.hidden_state or (),
        scores=None if output.scores is None else _scores_to_proto(output.scores),
        sparse_layers=output.sparse_layers,
        labels=(
            None
            if (labels := output.labels) is None
            else pb.Labels(names=labels.names, problem_type=labels.problem_type)
        ),
    )


def output_from_proto(message: Any) -> RequestOutput:
    return RequestOutput(
        request_id=message.request_id,
        prompt=message.prompt if message.HasField("prompt") else None,
        prompt_token_ids=list(message.prompt_token_ids),
        prompt_logprobs=(
            [_top_from_proto(t) if t.present else None for t in message.prompt_logprobs]
            if message.has_prompt_logprobs
            else None
        ),
        outputs=[_completion_from_proto(c) for c in message.outputs],
        finished=message.finished,
        num_cached_tokens=message.num_cached_tokens,
        epoch=message.epoch,
        hidden_state=list(message.hidden_state) or None,
        scores=_scores_from_proto(message.scores) if message.HasField("scores") else None,
        sparse_layers=tuple(message.sparse_layers),
        labels=(
            Labels(names=tuple(message.labels.names), problem_type=message.labels.problem_type)
            if message.HasField("labels")
            else None
        ),
    )


def info_to_proto(info: ServerInfo) -> Any:
    return pb.ServerInfoResponse(**{f.name: getattr(info, f.name) for f in fields(info)})


def info_from_proto(message: Any) -> ServerInfo:
    found = {f.name: getattr(message, f.name) for f in fields(ServerInfo)}
    return ServerInfo(**{**found, "features": tuple(message.features)})


def stats_to_json(stats: EngineStats) -> bytes:
    """Figures that were added later do not travel at their defaults: older peers know none."""
    added = {f.name: f.default for f in fields(EngineStats) if f.default is not MISSING}
    values = asdict(stats)
    return json.dumps({k: v for k, v in values.items() if k not in added or v != added[k]}).encode()


def stats_from_json(data: bytes) -> EngineStats:
    """Raises ``TransferFailed`` for what ``stats_to_json`` has not written; a newer peer's other
    figures are left out.
    """
    try:
        known = {f.name for f in fields(EngineStats)}
        values = {name: value for name, value in json.loads(data).items() if name in known}
        for name, value in values.items():
            if isinstance(value, dict) and value.keys() == {"bounds", "counts", "total"}:
                bounds, counts = tuple(value["bounds"]), tuple(value["counts"])
                values[name] = HistogramSnapshot(bounds, counts, value["total"])
        values["weight_update_errors"] = tuple(values.get("weight_update_errors", ()))
        return EngineStats(**values)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise TransferFailed(f"these are no figures of an engine: {error}") from error


def _completion_to_proto(completion: Completion) -> Any:
    logprobs, reason = completion.logprobs, completion.stop_reason
    return pb.Completion(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=pb.Logprobs(
            raw=logprobs.raw,
            processed=logprobs.processed,
            log_kept_mass=logprobs.log_kept_mass,
            top=_tops_to_proto(logprobs.top or ()),
            has_top=logprobs.top is not None,
        ),
        cumulative_logprob=completion.cumulative_logprob,
        finish_reason=completion.finish_reason,
        stop_token=reason if isinstance(reason, int) else None,
        stop_string=reason if isinstance(reason, str) else None,
        weight_versions=_spans_to_proto(completion.weight_versions),
        kv_spans=_spans_to_proto(completion.kv_spans),
        staleness=completion.staleness,
        routed_experts=_array_to_proto(completion.routed_experts),
        sampling_mask=_mask_to_proto(completion.sampling_mask),
        adapter=completion.adapter,
    )


def _completion_from_proto(message: Any) -> Completion:
    stop = message.WhichOneof("stop_reason")
    logprobs = message.logprobs
    return Completion(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=Logprobs(
            raw=list(logprobs.raw),
            processed=list(logprobs.processed),
            log_kept_mass=list(logprobs.log_kept_mass),
            top=[_top_from_proto(t) for t in logprobs.top] if logprobs.has_top else None,
        ),
        cumulative_logprob=message.cumulative_logprob,
        finish_reason=message.finish_reason if message.HasField("finish_reason") else None,
        stop_reason=getattr(message, stop) if stop else None,
        weight_versions=_spans_from_proto(message.weight_versions),
        kv_spans=_spans_from_proto(message.kv_spans),
        staleness=message.staleness,
        routed_experts=(
            _array_from_proto(message.routed_experts, _EXPERTS)
            if message.HasField("routed_experts")
            else None
        ),
        sampling_mask=(
            _mask_from_proto(message.sampling_mask) if message.HasField("sampling_mask") else None
        ),
        adapter=message.adapter,
    )


def _scores_to_proto(scores: PackedScores) -> Any:
    return pb.PackedScores(
        start=scores.start,
        logprobs=scores.logprobs.astype("<f4").tobytes(),
        top=scores.top_ids.shape[1],
        top_ids=scores.top_ids.astype("<i4").tobytes(),
        top_logprobs=scores.top_logprobs.astype("<f4").tobytes(),
    )


def _scores_from_proto(message: Any) -> PackedScores:
    logprobs = np.frombuffer(message.logprobs, "<f4")
    shape = (len(logprobs), message.top)
    try:
        return PackedScores(
            start=message.start,
            logprobs=logprobs,
            top_ids=np.frombuffer(message.top_ids, "<i4").reshape(shape),
            top_logprobs=np.frombuffer(message.top_logprobs, "<f4").reshape(shape),
        )
    except ValueError as error:
        raise TransferFailed(f"scores whose arrays do not fit: {error}") from error


def _mask_to_proto(mask: SamplingMask | None) -> Any:
    if mask is None:
        return None
    return pb.SamplingMask(counts=mask.counts, token_ids=mask.token_ids)


def _mask_from_proto(message: Any) -> SamplingMask:
    counts, ids = np.array(message.counts, np.int32), np.array(message.token_ids, np.int32)
    if (counts < 0).any() or counts.sum() != len(ids):
        raise TransferFailed("a sampling mask's counts are not those of its tokens")
    return SamplingMask(counts, ids)


def _array_to_proto(array: NDArray[Any] | None) -> Any:
    if array is None:
        return None
    data = np.ascontiguousarray(array).tobytes()
    return pb.PackedArray(data=data, shape=array.shape, dtype=array.dtype.name)


def _array_from_proto(message: Any, dtypes: tuple[str, ...]) -> NDArray[Any]:
    if message.dtype not in dtypes:
        raise TransferFailed(f"an array of {message.dtype!r} has come; {', '.join(dtypes)} may")
    try:
        return np.frombuffer(message.data, message.dtype).reshape(tuple(message.shape)).copy()
    except ValueError as error:
        raise TransferFailed(f"an array's bytes are not of its shape: {error}") from error


def _tops_to_proto(rows: Iterable[Mapping[int, float] | None]) -> list[Any]:
    return [
        pb.TokenLogprobs(present=True, token_ids=row.keys(), logprobs=row.values())
        if row is not None
        else pb.TokenLogprobs()
        for row in rows
    ]


def _top_from_proto(message: Any) -> dict[int, float]:
    if len(message.token_ids) != len(message.logprobs):
        raise TransferFailed("alternatives of a token whose ids and logprobs differ in number")
    return dict(zip(message.token_ids, message.logprobs, strict=True))


def _spans_to_proto(spans: Iterable[VersionSpan]) -> list[Any]:
    return [pb.VersionSpan(version=s.version, start=s.start, stop=s.stop) for s in spans]


def _spans_from_proto(messages: Iterable[Any]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(m.version, m.start, m.stop) for m in messages)
