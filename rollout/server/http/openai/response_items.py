"""The items of OpenAI's responses, made of an assistant's message as it grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rollout.server.http.openai.assistant import Message, call_id

Event = dict[str, Any]


class ResponseItems:
    """``events`` are what a message adds; ``done`` holds the items that are complete."""

    def __init__(self, response_id: str) -> None:
        self.done: list[dict[str, Any]] = []
        self._id = response_id
        self._old = Message()
        self._open: dict[str, Any] | None = None
        self._call = -1  # the number of the one that is open
        self._number = 0

    def events(self, message: Message) -> Iterator[Event]:
        """What ``message`` adds to the one before; an item ends where another begins."""
        old, self._old = self._old, message
        if thought := (message.reasoning or "")[len(old.reasoning or "") :]:
            yield from self._text("reasoning", "reasoning_text", thought)
        if text := message.content[len(old.content) :]:
            yield from self._text("message", "output_text", text)
        for number, call in enumerate(message.calls):
            known = old.calls[number].arguments if number < len(old.calls) else ""
            if number != self._call and number >= len(old.calls):
                yield from self.close()
                self._call = number
                item = {
                    "name": call.name,
                    "arguments": "",
                    "call_id": call_id(call, self._id, number),
                }
                yield from self._begin("function_call", item)
            if (more := call.arguments[len(known) :]) and self._open is not None:
                self._open["arguments"] += more
                yield self._event("response.function_call_arguments.delta", delta=more)

    def close(self) -> Iterator[Event]:
        """The open item, if one is, has its end."""
        item, self._open = self._open, None
        if item is None:
            return
        where = {"item_id": item["id"], "output_index": len(self.done)}
        if item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **where, **whole)
        else:
            part = item["content"][0]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            where["content_index"] = 0
            logprobs: dict[str, Any] = {} if kind == "reasoning_text" else {"logprobs": []}
            yield self._event(f"response.{kind}.done", **where, **logprobs, text=part["text"])
            yield self._event("response.content_part.done", **where, part=part)
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)

    def event(self, kind: str, **values: Any) -> Event:
        """Numbered, as all are."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _text(self, kind: str, part: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            empty: dict[str, Any] = {"type": part, "text": ""}
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            if kind == "message":
                empty |= {"annotations": [], "logprobs": []}
            yield from self._begin(kind, {**own, "content": []})
            assert self._open is not None
            self._open["content"].append(empty)
            yield self._event("response.content_part.added", content_index=0, part=empty)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{part}.delta", content_index=0, delta=text, **extra)

    def _begin(self, kind: str, values: dict[str, Any]) -> Iterator[Event]:
        name = f"{self._id}-{len(self.done)}"
        self._open = {"type": kind, "id": name, "status": "in_progress", **values}
        yield self._event("response.output_item.added", item=self._open)

    def _event(self, kind: str, **values: Any) -> Event:
        """Of the open item; a copy, since that goes on growing."""
        if self._open is not None:
            values = {"item_id": self._open["id"], "output_index": len(self.done), **values}
            if "item" in values:
                del values["item_id"]
        made: Event = json.loads(json.dumps(self.event(kind, **values)))
        return made
