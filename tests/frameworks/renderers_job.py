"""The data client of verifiers and prime-rl, as it is installed; prints what it saw as JSON.

python renderers_job.py URL CHECKPOINT MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from renderers import OverlongPromptError
from renderers.client import generate
from renderers.default import DefaultRenderer
from transformers import AutoTokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]
SAMPLING = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}


async def main() -> None:
    url, checkpoint, model = sys.argv[1:]
    renderer = DefaultRenderer(AutoTokenizer.from_pretrained(checkpoint))
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1) as client:

        async def ask(content: str = "Hi", **sampling: Any) -> dict[str, Any]:
            return await generate(
                client=client, renderer=renderer, messages=[{"role": "user", "content": content}],
                model=model, sampling_params={**SAMPLING, **sampling}, cache_salt="3",
                extra_headers={"X-Session-ID": "one"},
            )  # fmt: skip

        told = await ask()
        errors = {}
        for name, call in (("long", ask("Hi " * 600)), ("bad", ask(top_p=7.0))):
            try:
                await call
            except (OverlongPromptError, BadRequestError) as error:
                errors[name] = f"{type(error).__name__}: {error}"
    keys = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason")
    print(json.dumps({key: told[key] for key in keys} | {"errors": errors}))


if __name__ == "__main__":
    asyncio.run(main())
