"""Generate ``rollout_pb2.py``, ``.pyi`` and ``rollout_pb2_grpc.py`` of ``rollout/rpc``.

    python proto/generate.py            # needs grpcio-tools (the `dev` extra)

Generated code refuses runtimes older than its generator, though all it holds is one serialized
descriptor and protobuf's stable builder. The two checks are cut out, so that the stubs load on
every runtime that ``pyproject.toml`` allows. A test compares descriptors, not text.
"""

import re
import tempfile
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTO = "rollout/rollout.proto"  # virtual path: what imports and descriptors are named after
OUTPUTS = ("rollout_pb2.py", "rollout_pb2.pyi", "rollout_pb2_grpc.py")

_CUTS = {
    "rollout_pb2.py": (
        r"^from google\.protobuf import runtime_version as _runtime_version\n",
        r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?:    .*\n)*\)\n",
    ),
    "rollout_pb2_grpc.py": (
        r"^import warnings\n",
        r"^GRPC_GENERATED_VERSION = [\s\S]*?^    raise RuntimeError\(\n(?:        .*\n)*    \)\n",
    ),
}


def generate(into: Path) -> None:
    """Write the stubs to the folder ``into``."""
    from grpc_tools import protoc

    include = resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        status = protoc.main(
            [
                "protoc",
                f"-Irollout={HERE}",
                f"-I{include}",
                f"--python_out={folder}",
                f"--pyi_out={folder}",
                f"--grpc_python_out={folder}",
                PROTO,
            ]
        )
        if status:
            raise SystemExit(f"protoc failed with status {status} on {HERE / 'rollout.proto'}")
        for name in OUTPUTS:
            text = (Path(folder) / "rollout" / name).read_text()
            for pattern in _CUTS.get(name, ()):
                text, count = re.subn(pattern, "", text, flags=re.MULTILINE)
                if count != 1:
                    raise SystemExit(f"{name}: expected one {pattern!r}, found {count}")
            text = text.replace("from rollout import", "from rollout.rpc import")
            head = "# mypy: ignore-errors\n" if name.endswith(".pyi") else ""
            (into / name).write_text(head + text)


if __name__ == "__main__":
    generate(HERE.parent / "rollout" / "rpc")
