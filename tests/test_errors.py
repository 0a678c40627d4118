"""The error tree, its status table and its wire form."""

import http

import grpc
import pytest

from rollout import errors
from rollout.rpc.status import MAX_ERROR_TEXT, error_from_rpc, status_of


def _tree(cls=errors.RolloutError):
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


TREE = sorted(set(_tree()), key=lambda cls: cls.__name__)


def test_a_text_that_many_tensors_have_is_said_once():
    fault = "has dtype torch.int32, the model wants torch.bfloat16: dequantise it"
    problems = [f"layers.{n}.weight {fault}" for n in range(20)]
    said = errors.of_each(["x is missing", *problems, "y is missing"])
    assert said[0::2] == ["x is missing", "y is missing"]
    assert said[1].startswith(f"layers.0.weight {fault} (the same of layers.1.weight, layers.2.")
    assert said[1].endswith(" and 11 more)")


class Failed:
    """A failed call as a client sees it."""

    def __init__(self, code, details, trailing):
        self._parts = code, details, trailing

    def code(self):
        return self._parts[0]

    def details(self):
        return self._parts[1]

    def trailing_metadata(self):
        return self._parts[2]


def test_every_error_has_a_status_row_and_every_row_an_error():
    assert set(TREE) == set(errors.STATUS)


@pytest.mark.parametrize("cls", TREE)
def test_statuses_exist_in_grpc_and_http(cls):
    code, status = errors.STATUS[cls]
    assert hasattr(grpc.StatusCode, code)
    assert status == 499 or http.HTTPStatus(status)
    assert 400 <= status < 600


@pytest.mark.parametrize("cls", TREE)
def test_an_error_crosses_grpc_as_its_own_class(cls):
    back = error_from_rpc(Failed(*status_of(cls("q_proj: 3 of 4 äöü"))), "host:1")
    assert type(back) is cls
    assert str(back) == "q_proj: 3 of 4 äöü"


def test_an_error_from_outside_the_tree_crosses_as_an_engine_error_that_names_it():
    back = error_from_rpc(Failed(*status_of(KeyError("lost"))), "host:1")
    assert type(back) is errors.EngineError
    assert "KeyError" in str(back)


def test_a_long_message_is_cut_below_the_metadata_limit():
    _, details, trailing = status_of(errors.WeightMismatch("ä" * 100_000))
    assert len(details.encode()) <= 1024
    assert len(trailing[0][1]) < 8192 - 1024
    back = error_from_rpc(Failed(None, "", trailing), "host:1")
    assert len(str(back).encode()) <= MAX_ERROR_TEXT + 16


def test_an_unreachable_server_is_engine_closed_with_the_address_and_the_remedy():
    back = error_from_rpc(Failed(grpc.StatusCode.UNAVAILABLE, "refused", ()), "host:1")
    assert type(back) is errors.EngineClosed
    assert "host:1" in str(back)
    assert "rollout serve" in " ".join(str(back).split())


@pytest.mark.parametrize(
    ("code", "details", "cls"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "why", errors.ConfigError),
        (grpc.StatusCode.UNIMPLEMENTED, "why", errors.ConfigError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "longer timeout", errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", errors.EngineOverloaded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "9 larger than max", errors.InvalidRequest),
        (grpc.StatusCode.UNKNOWN, "why", errors.EngineError),
    ],
)
def test_a_status_without_our_metadata_is_judged_by_its_code(code, details, cls):
    back = error_from_rpc(Failed(code, details, None), "host:1")
    assert type(back) is cls
    assert "host:1" in str(back)
    assert details in str(back)


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to "
         "connect to remote host: Connection refused", "nothing listens there"),
        ("errors resolving h:5: [field:hostname lookup error:address lookup failed for h:5: Domain "
         "name not found]", "this host name is not known"),
        ("last error: UNAVAILABLE: ipv4:127.0.0.1:8000: Failed parsing HTTP/2 (Expected SETTINGS "
         "frame as the first frame, got frame type 79)", "is it the HTTP port?"),
        ("last error: UNAVAILABLE: recvmsg:Connection reset by peer (104)", "it has ended"),
        ("Socket closed", "it has ended"),
        ("words of a later release", "failed or broke"),
    ],
)  # fmt: skip
def test_why_a_service_does_not_answer_is_said_in_plain_words(details, words):
    text = str(error_from_rpc(Failed(grpc.StatusCode.UNAVAILABLE, details, ()), "host:1"))
    assert words in text
    assert "rollout serve MODEL" in text
    assert "a fleet's front listens once enough engines serve" in text
    assert not any(raw in text for raw in ("UNKNOWN", "UNAVAILABLE", "ipv4", "recvmsg", "field:"))


def test_value_errors_of_a_caller_are_value_errors():
    for cls in (errors.ConfigError, errors.InvalidRequest, errors.PromptTooLong):
        assert issubclass(cls, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
