"""OpenAI's Agents SDK works on a task: python openai_agents_job.py BASE_URL THRESHOLD TASK, and goes on when run again.

The conversation is kept in session.db of the current folder; the server compacts it from THRESHOLD tokens on.
"""

import asyncio
import base64
import subprocess
import sys
from pathlib import Path

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    ToolOutputImage,
    function_tool,
)
from openai import AsyncOpenAI


@function_tool
def run(command: str) -> str:
    """Runs a command in a shell."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


@function_tool
def write(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content)
    return "written"


@function_tool
def edit(path: str, old: str, new: str) -> str:
    """Replaces a text in a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "edited"


@function_tool
def look(path: str) -> ToolOutputImage:
    """Shows a picture."""
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return ToolOutputImage(image_url=f"data:image/png;base64,{data}")


async def main() -> None:
    base_url, threshold, task = sys.argv[1:]
    settings = ModelSettings(
        context_management=[{"type": "compaction", "compact_threshold": int(threshold)}],
        store=False,
        response_include=["reasoning.encrypted_content"],
    )
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        model = OpenAIResponsesModel("oscine-nano", client)
        agent = Agent(
            name="worker",
            instructions="You mend programs.",
            model=model,
            model_settings=settings,
            tools=[run, write, edit, look],
        )
        session = SQLiteSession("job", "session.db")
        config = RunConfig(tracing_disabled=True)
        streamed = Runner.run_streamed(agent, task, session=session, run_config=config, max_turns=50)
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)


asyncio.run(main())
