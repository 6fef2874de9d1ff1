"""A server over a GGUF file: answers and grammars, with the tokenizer that lies beside it."""

import json
import shutil
from pathlib import Path

import pytest

from oscine.checkpoint.folder import Checkpoint
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.model.config import ModelConfig
from oscine.model.tensors import tensor_specs
from tests.model.gguf_files import write_llama_cpp
from tests.server import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


@pytest.mark.needs("formats")
def test_a_gguf_file_is_served(tmp_path: Path) -> None:
    config = ModelConfig.from_file(NANO_FOLDER / "config.json")
    checkpoint = Checkpoint(NANO_FOLDER, config)
    write_llama_cpp(tmp_path / "nano.gguf", config, {name: checkpoint.get(name) for name in tensor_specs(config)})
    shutil.copy(NANO_FOLDER / "tokenizer.json", tmp_path)
    path = str(tmp_path / "nano.gguf")
    asked = {"model": path, "messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    with ServerProcess(path) as server:
        answer = server.post("/v1/chat/completions", asked)["choices"][0]["message"]
        assert "85" in answer["content"]
        answer = server.post("/v1/chat/completions", asked | {"response_format": form})["choices"][0]["message"]
        assert json.loads(answer["content"]).keys() == {"sum"}
