"""Writes the schemas beside it: what operators' CustomResourceDefinitions say of a resource's form.

    python tests/docs/crds/make.py CRD.yaml SOURCE...

Without descriptions, status and defaults; a pod's template is left out, since it is Kubernetes' own
and is checked as such. ``SOURCE`` is said in the file: project, version, licence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FORM = (
    *("type", "enum", "pattern", "required", "minimum", "maximum", "minItems", "maxItems"),
    *("minLength", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
)


def main(crd: str, source: str) -> None:
    spec = _loaded(crd)["spec"]
    [version] = [v for v in spec["versions"] if v["name"] == "v1"]
    whole = version["schema"]["openAPIV3Schema"]
    whole["properties"].pop("status", None)
    kind = spec["names"]["kind"]
    form = {"$comment": source, **_form(whole)}
    (HERE / f"{kind}.json").write_text(json.dumps(form, separators=(",", ":")) + "\n")


def _form(schema: dict[str, Any]) -> dict[str, Any]:
    kept = {name: schema[name] for name in FORM if name in schema}
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            kept[name] = _form(schema[name])
    if "properties" in schema:
        kept["properties"] = {
            name: {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            if name == "template" and "spec" in inner.get("properties", {})
            else _form(inner)
            for name, inner in schema["properties"].items()
        }
    return kept


def _loaded(path: str) -> Any:
    import yaml

    return yaml.safe_load(Path(path).read_text())


if __name__ == "__main__":
    main(sys.argv[1], " ".join(sys.argv[2:]))
