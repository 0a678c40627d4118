"""What holds no values is refused by name, in whatever it is passed, before a byte is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp._flat_param import FlatParameter

from rollout.errors import SourceFailed, WeightError, WeightMismatch

NAME = "model.norm.weight"
TRANSPORTS = ("inline", "grpc_stream", "broadcast", "ipc", "p2p")


class Wrapper(Tensor):
    """A wrapper of other tensors: it has a dtype and no values of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        kind = {"dtype": torch.float32, "device": inner.device}
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, **kind)
        made.inner = inner  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise AssertionError(f"{func} reads a tensor that should have been refused")


class Quantised(Wrapper):
    """One that says what it is made of, as torchao's do."""

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None


class ShardedTensor(Wrapper):
    """FSDP1's, which answers to nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"torch function {func.__name__!r} is not known for ShardedTensor")


def partitioned(tensor: Tensor) -> Tensor:
    left = tensor.new_empty(0)
    left.ds_id = 1  # type: ignore[attr-defined]
    return left


def flattened(tensor: Tensor) -> Tensor:
    return FlatParameter(tensor.flatten(), requires_grad=False)


def packed(tensor: Tensor) -> Tensor:
    """As bitsandbytes keeps it with ``bnb_4bit_quant_storage``: in one column of a float dtype."""
    codes = nn.Parameter(tensor.flatten()[: tensor.numel() // 8, None], requires_grad=False)
    codes.bnb_quantized = True  # type: ignore[attr-defined]
    return codes


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape)


KINDS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "fake": (fake, "FakeTensor"),
    "meta": (lambda t: t.to("meta"), "meta device"),
    "freed": (freed, "freed"),
    "sparse": (lambda t: t.to_sparse(), "to_dense"),
    "quantised": (lambda t: Quantised(t.to(torch.int8)), "dequantised"),
    "wrapper": (lambda t: Wrapper(t.to(torch.int8)), "stands for another tensor"),
    "sharded": (ShardedTensor, "ShardedTensor, .*pass the FSDP model"),
    "partitioned": (partitioned, "by ZeRO-3; pass the engine"),
    "flat": (flattened, "pass the FSDP model"),
    "packed": (packed, "bitsandbytes.*model.dequantize"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
}
FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": lambda state: state,
    "list": lambda state: list(state.items()),
    "generator": lambda state: iter(state.items()),
    "module": lambda state: module_of(state),
}


def module_of(state: dict[str, Any]) -> nn.Module:
    model, norm, nothing = nn.Module(), nn.Module(), nn.Module()
    model.model, nothing.norm = nothing, norm
    norm.register_buffer("weight", state[NAME])
    return model


@pytest.fixture(params=KINDS)
def refused(request: pytest.FixtureRequest, other_weights: dict[str, Tensor]) -> Any:
    make, says = KINDS[request.param]
    return {**other_weights, NAME: make(other_weights[NAME])}, rf"model\.norm\.weight.*{says}"


@pytest.mark.parametrize("form", FORMS)
def test_every_verb_refuses_it_by_name_in_any_form(
    client: Any, refused: Any, form: str, eventually: Any
) -> None:
    state, says = refused
    live = client.weight_version
    with pytest.raises(WeightMismatch, match=says):
        client.update_weights(FORMS[form](state), timeout=10)
    with pytest.raises(WeightMismatch, match=says):
        client.check_weights(FORMS[form](state), timeout=10)
    if form != "generator":
        report = client.preflight(FORMS[form](state))
        assert not report.equal
        assert len(report.problems) == 1
        assert NAME in report.problems[0]
    eventually(lambda: client.weight_info().state == "idle", 30)
    assert client.weight_version == live


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_refuses_it_by_name(
    client: Any, refused: Any, transport: str, eventually: Any
) -> None:
    state, says = refused
    for form in ("dict", "generator"):
        with pytest.raises(WeightMismatch, match=says):
            client.update_weights(FORMS[form](state), transport=transport, timeout=10)
    eventually(lambda: client.weight_info().state == "idle", 30)


def test_everything_that_holds_no_values_is_named_at_once(client: Any, other_weights: Any) -> None:
    state = {name: tensor.to("meta") for name, tensor in other_weights.items()}
    assert len(client.preflight(state).problems) == len(state)
    with pytest.raises(WeightMismatch, match=rf"and {len(state) - 9} more"):
        client.update_weights(state, timeout=10)


@pytest.mark.parametrize("odd", [None, 3, "text", [1.0]])
def test_what_is_no_tensor_is_named(client: Any, other_weights: Any, odd: Any) -> None:
    state = {**other_weights, "extra_state": odd}
    for form in ("dict", "list", "generator"):
        with pytest.raises(WeightError, match="extra_state"):
            client.update_weights(FORMS[form](state), timeout=10)
    assert "extra_state" in client.preflight(state).problems[0]


def test_a_decoder_alone_and_tensors_without_names_are_told_what_to_send(
    client: Any, other_weights: Any
) -> None:
    inner = {n.removeprefix("model."): t for n, t in other_weights.items() if "model." in n}
    with pytest.raises(WeightMismatch, match=r"send the whole model, not its \.model; "):
        client.update_weights(inner, timeout=10)
    with pytest.raises(WeightError, match="a Tensor without its name: pass the module, or named_"):
        client.update_weights(iter(other_weights.values()), timeout=10)


def test_preflight_takes_nothing_of_a_generator_and_says_that_it_cannot_tell(
    client: Any, other_weights: Any
) -> None:
    items = iter(other_weights.items())
    report = client.preflight(items)
    assert "cannot tell" in report.problems[0]
    assert not report.equal
    assert dict(items).keys() == other_weights.keys()
    for nothing in ([], {}, nn.ReLU()):
        assert "nothing can be sent" in client.preflight(nothing).problems[0]
        with pytest.raises(SourceFailed, match="nothing can be sent"):
            client.update_weights(nothing, timeout=10)


def test_preflight_of_a_list_knows_what_is_in_it(client: Any, other_weights: Any) -> None:
    report = client.preflight(list(other_weights.items()))
    assert report.equal
    assert report.num_tensors > 0
    assert report.cost is not None
