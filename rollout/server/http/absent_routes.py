"""Routes that clients of other engines look for, and what is served in their place."""

from __future__ import annotations

from collections.abc import Mapping

_RERANK = (
    "no reranker is served; POST /classify gives the scores of a checkpoint with a score head, "
    "/v1/embeddings vectors to compare"
)
_AUDIO = "no audio is served; POST /v1/chat/completions takes text, and images where the model does"
_IMAGES = "no image is generated; POST /v1/chat/completions gives text"
_ALONE = "no files or batches are kept; POST each request to /v1/completions, several at once"
_OLLAMA = "Ollama's API is not served; POST /v1/completions or /v1/chat/completions"
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RERANK),
    "/score": "POST /v1/score gives logprobs of token ids, /classify a score head's values",
    "/v1/audio": _AUDIO,
    "/v1/realtime": _AUDIO,
    "/v1/images": _IMAGES,
    "/v1/files": _ALONE,
    "/v1/batches": _ALONE,
    "/v1/moderations": "POST /classify gives the scores of a checkpoint with a score head",
    "/v1/messages": "use POST /v1/chat/completions",
    "/encode": "use POST /v1/embeddings",
    "/embed": "use POST /v1/embeddings",
    "/embeddings": "use POST /v1/embeddings",
    "/v1/pooling": "use POST /pooling",
    "/v1/tokenize": "use POST /tokenize",
    "/v1/detokenize": "use POST /detokenize",
    "/completions": "use POST /v1/completions",
    "/chat/completions": "use POST /v1/chat/completions",
    "/models": "use GET /v1/models",
    "/api/generate": _OLLAMA,
    "/api/chat": _OLLAMA,
    "/api/v1": "Tinker's SDK samples here alone; it trains elsewhere",
    "/docs": "docs/openai.md and docs/serving.md list what is served",
}


def instead_of(path: str) -> str:
    """What to use in the place of a path that is not served, "" where nothing is known."""
    path = path.rstrip("/")
    while path:
        if path in _INSTEAD:
            return _INSTEAD[path]
        path = path.rpartition("/")[0]
    return ""
