"""LoRA adapters by vLLM's routes: served beside the weights, or merged into what is live."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict

from rollout.api import AsyncRollout
from rollout.errors import ConfigError
from rollout.server.auth import Access
from rollout.server.http.guard import Engine, Routes
from rollout.server.verbs import served_of
from rollout.weight_sync.versions.directories import inside

routes = Routes()
LOADED_BY = "adapters are loaded by"


class LoadBody(BaseModel):
    """``load_inplace``: read the directory again, also where its files look the same.

    A name may always be loaded again, from another path or after its files have changed.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str
    lora_int_id: int | None = None  # vLLM's own number: not used


@routes.on("POST", "/v1/load_lora_adapter", Access.CONTROL)
async def load(rollout: Engine, body: LoadBody) -> dict[str, Any]:
    return await _loaded(rollout, body)


async def _loaded(rollout: AsyncRollout, body: LoadBody) -> dict[str, Any]:
    """A slot takes it, or checkpoint + adapter become the next version; asked again, it is done
    already.
    """
    served = served_of(rollout, LOADED_BY)
    done = await rollout.threads.run(
        lambda: served.load_lora_adapter(
            body.lora_name, body.lora_path, inplace=body.load_inplace, anywhere=False
        )
    )
    how = "merged into the weights" if done.merged else "loaded"
    return {"message": f"adapter {done.name!r} is {how}", "version": done.version}


@routes.on("POST", "/skyrl/v1/load_lora_adapter", Access.CONTROL)
async def load_again(rollout: Engine, body: LoadBody) -> dict[str, Any]:
    """SkyRL's trainer writes every step into one directory."""
    return await _loaded(rollout, body.model_copy(update={"load_inplace": True}))


@routes.on("POST", "/load_lora_adapter", Access.CONTROL)
async def load_once_written(rollout: Engine, body: LoadBody) -> dict[str, Any]:
    """prime-rl asks again upon a 404: a shared file system may show its files later."""
    try:
        return await _loaded(rollout, body)
    except ConfigError as error:
        path = inside(body.lora_path, served_of(rollout, LOADED_BY).weight_dirs)
        if (path / "adapter_config.json").is_file() and any(path.glob("*.safetensors")):
            raise
        raise HTTPException(404, str(error)) from error


@routes.on("POST", "/v1/unload_lora_adapter", Access.CONTROL)
@routes.on("POST", "/unload_lora_adapter", Access.CONTROL)
async def unload(rollout: Engine, body: UnloadBody) -> dict[str, Any]:
    """Of the live one that is merged: the checkpoint's weights become the next version."""
    served = served_of(rollout, LOADED_BY)
    found = await rollout.threads.run(lambda: served.unload_lora_adapter(body.lora_name))
    if not found:
        raise HTTPException(404, f"no adapter {body.lora_name!r:.300} is loaded")
    return {"message": f"adapter {body.lora_name!r} is unloaded"}
