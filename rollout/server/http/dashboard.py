"""A page that shows people what runs: one static file at ``/``, and the figures that it polls."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from pathlib import Path
from typing import Any

from fastapi.responses import Response

from rollout.api import AsyncRollout
from rollout.server.auth import Access
from rollout.server.http.guard import Engine, Routes
from rollout.weight_sync.protocol.receipts import UpdateReceipt

RECEIPTS = 32  # the last ones
STATS = (
    "state", "running", "waiting", "kv_usage", "num_kv_blocks", "generation_tokens_total",
    "preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "weight_updates_total", "weight_updates_failed_total", "last_stall_seconds", "following",
)  # fmt: skip
PAGE = Path(__file__).with_name("dashboard.html").read_text(encoding="utf-8")


def _policy(page: str) -> str:
    """A Content-Security-Policy under which the page's own style and script run, and no others."""

    def sources(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (hashlib.sha256(text.encode()).digest() for text in found)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


HEADERS = {
    "Content-Security-Policy": _policy(PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
routes = Routes()


@routes.on("GET", "/", Access.OPEN)
async def page() -> Response:
    """Without a token, as it holds no figure: it asks for one where its figures need one."""
    return Response(PAGE, media_type="text/html; charset=utf-8", headers=HEADERS)


@routes.on("GET", "/dashboard/state", Access.GENERATION)
async def state(rollout: Engine) -> dict[str, Any]:
    """One moment. ``time`` is this process's own clock, in seconds, for rates between two."""
    server, stats = await rollout.server_info(), await rollout.metrics()
    weights = await rollout.weight_info()
    errors = [*stats.weight_update_errors, *([stats.follow_error] if stats.follow_error else [])]
    return {
        "time": time.monotonic(),
        "model": server.model,
        "package": server.package_version,
        "max_model_len": server.max_model_len,
        "epoch": str(weights.epoch),  # numbers of 64 bits are none of JavaScript's
        "version": weights.version,
        "label": weights.label,
        "update": weights.state,
        "last_update_id": weights.last_update_id,
        "ranks": weights.num_ranks,
        "device": weights.device,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "tensors": len(weights.tensors),
        "bytes": sum(meta.nbytes for meta in weights.tensors),
        "memory": dict(weights.memory),
        "stats": {name: getattr(stats, name) for name in STATS},
        "errors": errors,
        "receipts": [
            _shown(receipt, rollout) for receipt in (await rollout.receipts())[-RECEIPTS:]
        ],
    }


def _shown(receipt: UpdateReceipt, rollout: AsyncRollout) -> dict[str, Any]:
    """``committed``: by the clock of ``time``, where it is known."""
    served = rollout.backend.served
    return {
        "committed": None if served is None else served.committed_at(receipt.version),
        "version": receipt.version,
        "label": receipt.label,
        "digest": f"{receipt.digest:016x}",
        "transport": receipt.transport,
        "num_tensors": receipt.num_tensors,
        "num_bytes": receipt.num_bytes,
        "wire_bytes": receipt.wire_bytes,
        "timings": dict(receipt.timings),
        "ranks": [
            {"rank": of.rank, "digest": f"{of.digest:016x}", "num_bytes": of.num_bytes}
            for of in receipt.ranks
        ],
        "update_id": receipt.update_id,
    }
