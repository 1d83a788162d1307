"""Server-sent events, framed strictly: ``data:`` lines with one JSON object each, an empty line after every event."""

from __future__ import annotations

import json
from typing import Any

MIMETYPE = "text/event-stream"
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back until its buffer is full
}


def data(value: dict[str, Any]) -> str:
    """One event. The JSON has no line breaks in it, whatever the texts have."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
