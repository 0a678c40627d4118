"""Strategies of hypothesis for messages that nobody should send; ``fuzz.py`` and tests draw them.

JSON documents in which parts of a good one are replaced; bytes that are no document; protobuf
messages that are cut, changed or carry such documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from rollout.rpc import rollout_pb2 as pb
from rollout.weight_sync.protocol.messages import (
    BucketEntry,
    BucketHeader,
    Seal,
    UpdateRequest,
)
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weights import Box
from rollout.wire.codec import to_plain

LARGE = [1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(1 << 63), -(1 << 63) - 1]
WORDS = ["float32", "bfloat16", "x", "inline", "broadcast", "ipc", "full", "delta", "keep", "wait"]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.sampled_from(LARGE), st.floats(),
    st.sampled_from([0.0, 1e-9, 1e30, 1e300, float("nan"), float("inf"), -float("inf")]),
    st.text(max_size=8), st.sampled_from(WORDS), st.sampled_from(["\ud800", "\x00", "a" * 5000]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def mangled(draw: Any, good: Any) -> Any:
    """A good document with some of its parts, however deep, replaced, left out or added to."""
    document = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        at = document
        while isinstance(at, dict | list) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            how = draw(st.integers(0, 9))
            if how == 0:
                del at[key]
            elif how == 1 and isinstance(at, dict):
                at[draw(st.text(max_size=6))] = draw(scalars)
            else:
                at[key] = draw(values)
            break
    return document


def no_documents() -> st.SearchStrategy[bytes]:
    """Bytes that are no JSON document, or one that a reader may stumble over."""
    return st.one_of(
        st.binary(max_size=64),
        st.integers(100, 100_000).map(lambda deep: b"[" * deep),
        st.integers(100, 20_000).map(lambda deep: b'{"a":' * deep + b"1" + b"}" * deep),
        st.integers(100, 20_000).map(lambda deep: b"[" * deep + b"]" * deep),
        st.sampled_from([
            b"", b"null", b"[]", b"0", b'"x"', b"{", b'{"a":NaN}', b"Infinity", b"1" * 5000,
            b'{"prompt":[1],"prompt":"x"}', b"\xff\xfe{\x00}\x00", b'{"prompt":"\xff"}',
            b'\xef\xbb\xbf{"prompt":[1]}', b'{"prompt":"\\ud800"}',
        ]),
    )  # fmt: skip


def documents(good: Any) -> st.SearchStrategy[bytes]:
    """Mostly JSON, mostly almost ``good``."""
    return st.one_of(
        st.just(json.dumps(good).encode()),
        mangled(good).map(lambda d: json.dumps(d).encode()),
        values.map(lambda d: json.dumps(d).encode()),
        no_documents(),
    )


@st.composite
def changed(draw: Any, data: bytes) -> bytes:
    """``data`` with some of its bytes replaced, left out, repeated, or cut off."""
    out = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(out)))
        how = draw(st.integers(0, 3))
        if how == 0:
            out[at : at + 1] = draw(st.binary(min_size=1, max_size=4))
        elif how == 1:
            del out[at : at + draw(st.integers(1, 4))]
        elif how == 2:
            out[at:at] = out[max(0, at - 4) : at]
        else:
            del out[at:]
    return bytes(out)


# ---- what is good ----

COMPLETION = {
    "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0.5, "n": 2, "top_p": 0.9, "top_k": 5,
    "min_p": 0.0, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0}, "seed": 7, "stop": ["ab"], "stop_token_ids": [9], "min_tokens": 1,
    "logprobs": 2, "prompt_logprobs": None, "ignore_eos": True, "stream": False,
    "stream_options": {"include_usage": True}, "return_token_ids": True, "request_id": "r",
    "logprobs_mode": "raw_logprobs", "best_of": 2,
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "user", "content": [{"type": "text"}]}]
CHAT = {"messages": MESSAGES[:1], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
INIT = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
UPDATE_INFO = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[2, 2]], "packed": False}
BODIES: Mapping[str, Any] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": {"prompt": "Hello", "add_special_tokens": True},
    "/abort_requests": {"request_ids": ["a", "b"]},
    "/start_weight_update": {"timeout": 0.2, "deadline": 1.0, "in_flight": "keep"},
    "/update_weights": {"update_info": UPDATE_INFO},
    "/finish_weight_update": {"weight_version": "v"},
    "/abort_weight_update": {"reason": "x"},
}
QUERIES: Mapping[str, Mapping[str, list[str]]] = {
    "/pause": {"mode": ["keep", "wait", "abort", "x"], "clear_cache": ["true", "x"]},
    "/sleep": {"level": ["1", "2", "0", "x", "1e9", "9" * 30]},
    "/wake_up": {"tags": ["weights", "kv_cache", "x", ""]},
    "/resume": {}, "/reset_prefix_cache": {}, "/health": {}, "/metrics": {}, "/v1/models": {},
    "/server_info": {"config_format": ["json", "x" * 5000]}, "/weight_info": {}, "/is_paused": {},
}  # fmt: skip
TIMEOUTS = ["0.2", "0", "-1", "nan", "inf", "1e300", "x", ""]

ENTRY = BucketEntry("x", torch.float32, (2, 2), Box.full((2, 2)), 0, 16)
HEADER = to_plain(BucketHeader(0, (ENTRY,), 16))
REQUEST = to_plain(UpdateRequest(update_id="u", bucket_bytes=1 << 10, timeout=0.2))
SEAL = to_plain(Seal(num_buckets=1, digests={"x": 1}))
OPTIONS = UpdateOptions(timeout=0.5).to_server()


def document(data: bytes) -> Any:
    return pb.WeightDocument(json=data)


# ---- messages of the services ----


def http_calls() -> st.SearchStrategy[tuple[str, str, dict[str, str], str, bytes]]:
    """(method, path, query, content type, body); the path is one of the server's, mostly."""
    others = st.sampled_from(["PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
    methods = st.one_of(*[st.just("POST")] * 3, st.just("GET"), others)
    kinds = ["text/plain", "application/x-www-form-urlencoded", "x/y; charset=zz", ""]
    types = st.one_of(*[st.just("application/json")] * 3, st.sampled_from(kinds))

    def bodies(path: str) -> st.SearchStrategy[Any]:
        query = st.fixed_dictionaries(
            {}, optional={k: st.sampled_from(v) for k, v in QUERIES.get(path, {}).items()}
        )
        if path in ("/pause", "/sleep", "/wake_up"):
            limits = st.sampled_from(TIMEOUTS)
            query = st.builds(lambda q, t: {**q, "timeout": t}, query, limits)
        good = BODIES.get(path, {"a": 1})
        return st.tuples(methods, st.just(path), query, types, documents(good))

    paths = [*BODIES, *BODIES, *QUERIES, "/nowhere", "/v1", "/health/", "/%00", "/%ff", "//health"]
    inits = st.builds(
        lambda info: json.dumps({"init_info": info, "timeout": 0.2}).encode(), mangled(INIT)
    )
    init = st.tuples(
        st.just("POST"), st.just("/init_weight_transfer_engine"), st.just({}), types, inits
    )
    return st.one_of(st.sampled_from(paths).flatmap(bodies), init)


def grpc_calls() -> Mapping[str, st.SearchStrategy[list[bytes]]]:
    """ "Service/Method" -> the bytes of its requests; one, but for ``Update``."""
    prompts = [pb.Prompt(token_ids=pb.TokenIds(ids=[5, 6])), pb.Prompt(text="Hello")]
    params = pb.SamplingParams(
        json=b'{"n": 2, "temperature": 0.5, "max_tokens": 2, "top_k": 3, "stop": "a"}'
    )
    generate = pb.GenerateRequest(prompts=prompts, params=[params])
    chats = documents(MESSAGES).map(
        lambda d: pb.ChatRequest(conversations=[pb.Conversation(messages_json=d)], params=[params])
    )
    limits = st.sampled_from([0.2, -1.0, 0.0, float("nan"), float("inf"), 1e300])
    modes = st.sampled_from(["keep", "wait", "abort", "", "x"])
    levels = st.sampled_from([0, 1, 3, -1])
    tags = st.lists(st.sampled_from(["weights", "kv_cache", "x"]), max_size=3)
    plain: dict[str, st.SearchStrategy[Any]] = {
        "Generation/Generate": st.just(generate),
        "Generation/Chat": chats,
        "Generation/Tokenize": st.one_of(
            documents(MESSAGES).map(lambda d: pb.TokenizeRequest(messages_json=d)),
            st.just(pb.TokenizeRequest(text="Hello")),
        ),
        "Generation/Abort": st.just(pb.AbortRequest(request_ids=["a"])),
        "Control/ServerInfo": st.just(pb.ServerInfoRequest()),
        "Control/Stats": st.just(pb.StatsRequest()),
        "Control/Resume": st.just(pb.ResumeRequest()),
        "Control/ResetPrefixCache": st.just(pb.ResetPrefixCacheRequest()),
        "Control/Pause": st.builds(lambda m, t: pb.PauseRequest(mode=m, timeout=t), modes, limits),
        "Control/Sleep": st.builds(
            lambda n, t: pb.SleepRequest(level=n, timeout=t), levels, limits
        ),
        "Control/WakeUp": st.builds(lambda n, t: pb.WakeUpRequest(tags=n, timeout=t), tags, limits),
        "WeightSync/Info": st.just(pb.WeightInfoRequest()),
        "WeightSync/Receipts": st.just(pb.ReceiptsRequest()),
        "WeightSync/Rollback": limits.map(lambda t: pb.RollbackRequest(timeout=t)),
        "WeightSync/Digests": limits.map(lambda t: pb.DigestsRequest(timeout=t)),
        "WeightSync/UpdateFrom": st.builds(
            lambda path, o: pb.UpdateFromRequest(path=path, options_json=o),
            st.sampled_from(["", "/", "/etc/passwd", "../..", "a" * 5000, "\x00"]),
            documents(OPTIONS),
        ),
        "WeightSync/StartWeightUpdate": documents(BODIES["/start_weight_update"]).map(document),
        "WeightSync/UpdateWeights": documents(BODIES["/update_weights"]).map(document),
        "WeightSync/FinishWeightUpdate": documents(BODIES["/finish_weight_update"]).map(document),
        "WeightSync/AbortWeightUpdate": documents(BODIES["/abort_weight_update"]).map(document),
        "WeightSync/InitWeightTransferEngine": mangled(INIT).map(
            lambda info: document(json.dumps({"init_info": info, "timeout": 0.2}).encode())
        ),
    }
    calls = {name: one.flatmap(_as_bytes).map(lambda data: [data]) for name, one in plain.items()}
    return {**calls, "WeightSync/Update": update_streams()}


def _as_bytes(message: Any) -> st.SearchStrategy[bytes]:
    data = message.SerializeToString()
    return st.one_of(st.just(data), changed(data), st.binary(max_size=32))


def update_streams() -> st.SearchStrategy[list[bytes]]:
    """The commands of one ``Update``, with and without an orderly beginning."""
    begin = pb.UpdateCommand(begin=document(json.dumps(REQUEST).encode())).SerializeToString()
    held = json.dumps({**REQUEST, "offer": {"grace": 0.2, "senders": 2}}).encode()
    one = commands().flatmap(_as_bytes)
    return st.builds(
        lambda first, rest: [*first, *rest],
        st.sampled_from(
            [[], [begin], [pb.UpdateCommand(begin=document(held)).SerializeToString()]]
        ),
        st.lists(one, max_size=6),
    )


def commands() -> st.SearchStrategy[Any]:
    names = st.sampled_from(["u", "", "u/1", "x" * 3000])
    numbers = st.sampled_from([0, 1, 2, 1 << 31, (1 << 32) - 1])
    return st.one_of(
        documents(REQUEST).map(lambda d: pb.UpdateCommand(begin=document(d))),
        st.builds(
            lambda d, n: pb.UpdateCommand(bucket=pb.Bucket(header_json=d, payload_bytes=n)),
            st.one_of(documents(HEADER), st.just(json.dumps(HEADER).encode())),
            st.sampled_from([0, 16, 17, 1 << 62]),
        ),
        st.binary(max_size=40).map(lambda data: pb.UpdateCommand(chunk=data)),
        st.builds(
            lambda i, t: pb.UpdateCommand(wait=pb.Wait(index=i, timeout=t)), numbers,
            st.sampled_from([0.0, 0.1, -1.0, float("nan"), float("inf"), 1e300]),
        ),
        documents(SEAL).map(lambda d: pb.UpdateCommand(seal=document(d))),
        st.builds(
            lambda u, s, n: pb.UpdateCommand(join=pb.Join(update_id=u, secret=s, lane=n)),
            names, names, numbers,
        ),
        st.builds(
            lambda u, s, n: pb.UpdateCommand(resume=pb.Resume(update_id=u, secret=s, events=n)),
            names, names, numbers,
        ),
        st.just(pb.UpdateCommand(commit=pb.Commit())),
        st.just(pb.UpdateCommand(abort=pb.AbortUpdate(reason="x"))),
        st.just(pb.UpdateCommand()),
    )  # fmt: skip
