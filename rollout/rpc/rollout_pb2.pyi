# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "request_id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    request_id: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompts", "params", "stream")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    params: _containers.RepeatedCompositeFieldContainer[SamplingParams]
    stream: bool
    def __init__(self, prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., params: _Optional[_Iterable[_Union[SamplingParams, _Mapping]]] = ..., stream: _Optional[bool] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("conversations", "params", "stream")
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    conversations: _containers.RepeatedCompositeFieldContainer[Conversation]
    params: _containers.RepeatedCompositeFieldContainer[SamplingParams]
    stream: bool
    def __init__(self, conversations: _Optional[_Iterable[_Union[Conversation, _Mapping]]] = ..., params: _Optional[_Iterable[_Union[SamplingParams, _Mapping]]] = ..., stream: _Optional[bool] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages_json", "request_id")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    messages_json: bytes
    request_id: str
    def __init__(self, messages_json: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("index", "output")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    index: int
    output: RequestOutput
    def __init__(self, index: _Optional[int] = ..., output: _Optional[_Union[RequestOutput, _Mapping]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "has_prompt_logprobs", "outputs", "finished", "num_cached_tokens", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    has_prompt_logprobs: bool
    outputs: _containers.RepeatedCompositeFieldContainer[Completion]
    finished: bool
    num_cached_tokens: int
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., has_prompt_logprobs: _Optional[bool] = ..., outputs: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., finished: _Optional[bool] = ..., num_cached_tokens: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "cumulative_logprob", "finish_reason", "stop_token", "stop_string", "weight_versions", "kv_spans")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_SPANS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    cumulative_logprob: float
    finish_reason: str
    stop_token: int
    stop_string: str
    weight_versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    kv_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ..., finish_reason: _Optional[str] = ..., stop_token: _Optional[int] = ..., stop_string: _Optional[str] = ..., weight_versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., kv_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("raw", "processed", "log_kept_mass", "top", "has_top")
    RAW_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_FIELD_NUMBER: _ClassVar[int]
    LOG_KEPT_MASS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    HAS_TOP_FIELD_NUMBER: _ClassVar[int]
    raw: _containers.RepeatedScalarFieldContainer[float]
    processed: _containers.RepeatedScalarFieldContainer[float]
    log_kept_mass: _containers.RepeatedScalarFieldContainer[float]
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    has_top: bool
    def __init__(self, raw: _Optional[_Iterable[float]] = ..., processed: _Optional[_Iterable[float]] = ..., log_kept_mass: _Optional[_Iterable[float]] = ..., top: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., has_top: _Optional[bool] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("present", "token_ids", "logprobs")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    present: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, present: _Optional[bool] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "stop")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    stop: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "messages_json", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages_json: bytes
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., messages_json: _Optional[bytes] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids", "all")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class WeightInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightDocument(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: float
    def __init__(self, timeout: _Optional[float] = ...) -> None: ...

class UpdateFromRequest(_message.Message):
    __slots__ = ("path", "options_json")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    path: str
    options_json: bytes
    def __init__(self, path: _Optional[str] = ..., options_json: _Optional[bytes] = ...) -> None: ...

class DigestsRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: float
    def __init__(self, timeout: _Optional[float] = ...) -> None: ...

class DigestsResponse(_message.Message):
    __slots__ = ("digests",)
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.ScalarMap[str, int]
    def __init__(self, digests: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ReceiptsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReceiptsResponse(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[WeightDocument]
    def __init__(self, receipts: _Optional[_Iterable[_Union[WeightDocument, _Mapping]]] = ...) -> None: ...

class UpdateCommand(_message.Message):
    __slots__ = ("begin", "bucket", "chunk", "wait", "seal", "commit", "abort", "resume", "join")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    begin: WeightDocument
    bucket: Bucket
    chunk: bytes
    wait: Wait
    seal: WeightDocument
    commit: Commit
    abort: AbortUpdate
    resume: Resume
    join: Join
    def __init__(self, begin: _Optional[_Union[WeightDocument, _Mapping]] = ..., bucket: _Optional[_Union[Bucket, _Mapping]] = ..., chunk: _Optional[bytes] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., seal: _Optional[_Union[WeightDocument, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[AbortUpdate, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("update_id", "secret", "lane")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    secret: str
    lane: int
    def __init__(self, update_id: _Optional[str] = ..., secret: _Optional[str] = ..., lane: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("update_id", "secret", "events")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    secret: str
    events: int
    def __init__(self, update_id: _Optional[str] = ..., secret: _Optional[str] = ..., events: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("header_json", "payload_bytes")
    HEADER_JSON_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    header_json: bytes
    payload_bytes: int
    def __init__(self, header_json: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("index", "timeout")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    index: int
    timeout: float
    def __init__(self, index: _Optional[int] = ..., timeout: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortUpdate(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class UpdateEvent(_message.Message):
    __slots__ = ("begun", "taken", "sealed", "receipt", "received", "secret")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    begun: WeightDocument
    taken: Taken
    sealed: Sealed
    receipt: WeightDocument
    received: Received
    secret: str
    def __init__(self, begun: _Optional[_Union[WeightDocument, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., receipt: _Optional[_Union[WeightDocument, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: int
    def __init__(self, commands: _Optional[int] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfoResponse(_message.Message):
    __slots__ = ("model", "epoch", "version", "state", "max_model_len", "has_tokenizer", "package_version", "protocol", "world_size")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    version: int
    state: str
    max_model_len: int
    has_tokenizer: bool
    package_version: str
    protocol: int
    world_size: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., state: _Optional[str] = ..., max_model_len: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., package_version: _Optional[str] = ..., protocol: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode", "timeout")
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    mode: str
    timeout: float
    def __init__(self, mode: _Optional[str] = ..., timeout: _Optional[float] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level", "timeout")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    level: int
    timeout: float
    def __init__(self, level: _Optional[int] = ..., timeout: _Optional[float] = ...) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ("tags", "timeout")
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    timeout: float
    def __init__(self, tags: _Optional[_Iterable[str]] = ..., timeout: _Optional[float] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...
