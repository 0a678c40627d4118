"""Generate ``rollout/rpc/rollout_pb2.py`` from ``rollout.proto``.

    python proto/generate.py            # needs grpcio-tools (the `dev` extra)

Generated code refuses runtimes older than its generator, though all it holds is one serialized
descriptor and protobuf's stable builder. The check is cut out, so that the messages load on every
runtime that ``pyproject.toml`` allows. Services are made from the descriptor (``rpc/services.py``).
"""

import re
import tempfile
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTO = "rollout/rollout.proto"  # virtual path: what imports and descriptors are named after
OUTPUT = "rollout_pb2.py"

_CUTS = (
    r"^from google\.protobuf import runtime_version as _runtime_version\n",
    r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?:    .*\n)*\)\n",
)


def generate(into: Path) -> None:
    """Write the messages to the folder ``into``."""
    from grpc_tools import protoc

    include = resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["protoc", f"-Irollout={HERE}", f"-I{include}", f"--python_out={folder}", PROTO]
        if status := protoc.main(arguments):
            raise SystemExit(f"protoc failed with status {status} on {HERE / 'rollout.proto'}")
        text = (Path(folder) / "rollout" / OUTPUT).read_text()
    for pattern in _CUTS:
        text, count = re.subn(pattern, "", text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{OUTPUT}: expected one {pattern!r}, found {count}")
    (into / OUTPUT).write_text(text)


if __name__ == "__main__":
    generate(HERE.parent / "rollout" / "rpc")
