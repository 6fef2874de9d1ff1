"""A client that names a hostile MCP server."""

import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.serving.promises import require
from benchmarks.serving.server import Server
from benchmarks.serving.siege.clients import HOSTILE, ask
from benchmarks.serving.siege.ground import Run
from benchmarks.serving.siege.mcp_servers import Answer, listing, serving_in_thread
from benchmarks.serving.siege.shapes import RESPONSES

TOOL_TIMEOUT_S = 2.0
ANSWER_S = 3.0  # for all but the tool


def listing_of(answer: Answer, clients: int = 1) -> Run:
    """Responses for which a server lists its tools so."""

    def run(server: Server) -> str:
        with serving_in_thread(listing(answer)) as url, ThreadPoolExecutor(clients) as threads:
            return [*threads.map(lambda _: _respond(server, url), range(clients))][-1]

    return run


def _respond(server: Server, url: str) -> str:
    tool = {"type": "mcp", "server_label": "s", "server_url": url, "require_approval": "never"}
    body = {"input": "hi", "tools": [tool], "tool_choice": "none", "max_output_tokens": 16}
    began_s = time.monotonic()
    status, response = ask(server, HOSTILE, RESPONSES, body)
    took_s = time.monotonic() - began_s
    require(status == 200, f"{status} {response}")
    require(took_s <= TOOL_TIMEOUT_S + ANSWER_S, f"{took_s:.1f} s with a tool timeout of {TOOL_TIMEOUT_S:g} s")
    return f"{response['output'][0]['error'] or 'listed'} after {took_s:.1f} s"
