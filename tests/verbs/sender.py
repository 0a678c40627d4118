"""A framework's trainer in plain torch: the store, rank 0 of the group, and broadcasts."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import torch
import torch.distributed as dist
from free_ports import free_port
from shared_engines import eventually


class Sender:
    """Speaks to one server; ``ranks`` is how many places the engine takes in the group."""

    latest: Sender | None = None  # who has joined last: of all others the engine has let go

    def __init__(self, http: httpx.Client, ranks: int, *, packed: bool = False) -> None:
        self.http, self.packed = http, packed
        self.size, self.port = ranks + 1, free_port()
        self.whole = False  # whether a test has left its group as it was
        self.group: Any = None
        self._store: Any = None

    @property
    def init_info(self) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self.size,
        }

    def post(self, verb: str, body: Any = None) -> httpx.Response:
        return self.http.post(f"/{verb}", json=body)

    def init(self, **more: Any) -> httpx.Response:
        if self.group is not None:  # of a test before
            self.close()
            self.port = free_port()
        with ThreadPoolExecutor(1) as pool:
            info = {**self.init_info, **more}
            future = pool.submit(self.post, "init_weight_transfer_engine", {"init_info": info})
            self.join()
            return future.result()

    def joined(self) -> Sender:
        """Has joined, now or in a test before."""
        if self.group is None:
            assert self.init().status_code == 200
        return self

    def join(self, limit: float = 120.0) -> None:
        """As vLLM's trainer does: the store waits for all members, then the group forms."""
        Sender.latest = self
        timeout = timedelta(seconds=limit)
        self._store = dist.TCPStore(
            "127.0.0.1", self.port, self.size, is_master=True, timeout=timeout
        )
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        self.group = dist.ProcessGroupGloo(self._store, 0, self.size, options)

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], **info: Any) -> httpx.Response:
        """Announce and broadcast at the same time; what the broadcast met is in ``sent``."""
        tensors = list(tensors)
        if self.packed:
            info = {"packed": True, **info}
        body = {"update_info": {**described(tensors), **info}}
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self.post, "update_weights", body)
            self.sent = self.broadcast([tensor for _, tensor in tensors], info)
            return future.result()

    def arrived(self) -> None:
        """Wait until an update_weights is under way: the start of another one is told so."""
        other = {"update_id": "another"}
        text = "update_weights is under way"
        eventually(lambda: text in self.post("start_weight_update", other).text)

    def broadcast(self, tensors: list[torch.Tensor], info: dict[str, Any]) -> Exception | None:
        try:
            for payload in self._payloads(tensors, info):
                self.group.broadcast(payload, 0).wait()
        except RuntimeError as error:
            return error
        return None

    def _payloads(self, tensors: list[torch.Tensor], info: dict[str, Any]) -> list[torch.Tensor]:
        raw = [t.detach().contiguous().view(-1).view(torch.uint8).clone() for t in tensors]
        if not self.packed:
            return raw
        limit, packs, pack = info.get("packed_buffer_size_bytes", 1 << 30), [], []
        for part in raw:
            pack.append(part)
            if sum(p.numel() for p in pack) > limit:
                packs, pack = [*packs, torch.cat(pack)], []
        return [*packs, torch.cat(pack)] if pack else packs

    def later(self, call: Any, *args: Any) -> Future[Any]:
        """``call`` in a thread of its own."""
        future: Future[Any] = Future()
        threading.Thread(target=lambda: future.set_result(call(*args)), daemon=True).start()
        return future

    def close(self) -> None:
        self.group = self._store = None


def described(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """vLLM's update_info of these tensors."""
    rows = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
    names, dtypes, shapes = (list(column) for column in zip(*rows, strict=True))
    return {"names": names, "dtype_names": dtypes, "shapes": shapes}
