"""Answers in JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette import responses


class JSONResponse(responses.JSONResponse):
    """UTF-8, where half a surrogate pair, which UTF-8 lacks, stays escaped as a caller sent it."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")  # "\\ud800" is JSON's escape, too
