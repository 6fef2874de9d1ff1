"""Answers as JSON."""

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(answer: Any, status: int = 200) -> Response:
    """`answer` is a struct, or plain objects."""
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
