"""An agent of LangChain works on a task: python langchain_job.py BASE_URL THRESHOLD TASK, and goes on when run again.

The conversation is kept in session.json of the current folder; a middleware summarises it from THRESHOLD tokens on.
"""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import BaseMessage, messages_from_dict, messages_to_dict
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

SESSION = Path("session.json")


@tool
def run(command: str) -> str:
    """Runs a command in a shell."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


@tool
def write(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content)
    return "written"


@tool
def edit(path: str, old: str, new: str) -> str:
    """Replaces a text in a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "edited"


@tool
def look(path: str) -> list[dict[str, Any]]:
    """Shows a picture."""
    return [{"type": "image", "base64": base64.b64encode(Path(path).read_bytes()).decode(), "mime_type": "image/png"}]


def main() -> None:
    base_url, threshold, task = sys.argv[1:]
    options: Any = {"model": "oscine-nano", "base_url": base_url, "api_key": "none", "max_retries": 0}
    model = ChatOpenAI(**options, use_responses_api=True, store=False, include=["reasoning.encrypted_content"])
    short = SummarizationMiddleware(model, trigger=("tokens", int(threshold)), keep=("messages", 4))
    agent = create_agent(model, [run, write, edit, look], system_prompt="You mend programs.", middleware=[short])
    said: list[BaseMessage] = messages_from_dict(json.loads(SESSION.read_text())) if SESSION.exists() else []
    state: Any = {"messages": [*said, {"role": "user", "content": task}]}
    done = agent.invoke(state, {"recursion_limit": 200})
    SESSION.write_text(json.dumps(messages_to_dict(done["messages"])))
    print(done["messages"][-1].text)


main()
