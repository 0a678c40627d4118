"""The committed messages are those of ``proto/rollout.proto`` and load on every runtime."""

import importlib.util
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool

from rollout.rpc import rollout_pb2

ROOT = Path(__file__).parents[1]


def _generator():
    spec = importlib.util.spec_from_file_location("generate_proto", ROOT / "proto" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _descriptor(text):
    """The file descriptor inside generated code, without registering it a second time."""
    start = text.index("AddSerializedFile(") + len("AddSerializedFile(")
    literal = text[start : text.index("\n", start)].rstrip(")")
    serialized = eval(literal, {"__builtins__": {}})  # a bytes literal
    descriptor = descriptor_pb2.FileDescriptorProto.FromString(serialized)
    descriptor_pool.DescriptorPool().Add(descriptor)  # complete: everything it names is there
    return descriptor


def test_committed_messages_hold_the_descriptor_of_the_proto_file(tmp_path):
    _generator().generate(tmp_path)
    fresh = _descriptor((tmp_path / "rollout_pb2.py").read_text())
    committed = descriptor_pb2.FileDescriptorProto()
    rollout_pb2.DESCRIPTOR.CopyToProto(committed)
    assert fresh == committed


def test_the_messages_do_not_refuse_older_runtimes():
    text = (ROOT / "rollout" / "rpc" / "rollout_pb2.py").read_text()
    assert "ValidateProtobufRuntimeVersion" not in text
