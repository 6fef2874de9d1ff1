"""Files of models that are made to wait, to take memory, or to write on a terminal; and a program that opens them.

`python -m tests.extensions.formats.hostile_files FOLDER` makes each in a folder of its own, opens it as `oscine
serve` or `oscine convert` does, and prints a line of JSON for each, then the largest memory that it had.
"""

import json
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file

from oscine.chat.tokenizer import SPECIAL_TOKENS, Tokenizer
from oscine.chat.vocabulary import tokenizer_folder
from oscine.checkpoint.hub import ADAPTER, CONFIG, INDEX, NANO_FOLDER, SINGLE, TOKENIZER
from oscine.checkpoint.opened import open_model
from oscine.executor.sampling.masks import GrammarCache
from oscine.extensions.formats.convert import convert
from oscine.settings.config import EngineOptions, ModelOptions
from tests.byte_tokenizer import write_byte_tokenizer
from tests.model.tiny import tensors
from tests.tiny import BYTES

RED = "\x1b[31m\r\n"
LONG = RED * 200_000  # 1.4 MB
MANIFEST = "manifests/registry.ollama.ai/library/gpt-oss/20b"
GENERATION, TEMPLATE, LORA = "generation_config.json", "chat_template.jinja", "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
PLAIN_ADAPTER = {"r": 2, "lora_alpha": 4}


class Hostile(NamedTuple):
    name: str
    file: str  # which the error names
    make: Callable[[Path], object]  # in place of that file


# ---- what may stand in the place of any file ----


def text(content: str, encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding)


def data(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def sparse(size: int, head: bytes = b"") -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.write_bytes(head)
        os.truncate(path, size)

    return make


def changed(**values: Any) -> Callable[[Path], object]:
    """The model's config.json, with other values; a tuple is JSON as it stands."""

    def make(path: Path) -> None:
        marks = {name: f"<{name}>" if isinstance(value, tuple) else value for name, value in values.items()}
        content = json.dumps(BYTES.to_dict() | marks)
        for name, value in values.items():
            if isinstance(value, tuple):
                content = content.replace(f'"<{name}>"', value[0])
        path.write_text(content)

    return make


def rope(name: str, value: str) -> Callable[[Path], object]:
    known = BYTES.to_dict()["rope_scaling"] | {name: 0}
    return changed(rope_scaling=(json.dumps(known).replace(f'"{name}": 0', f'"{name}": {value}'),))


def tokenizer(**values: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(json.loads(tokenizer_text(path.parent)) | values))


def tokenizer_text(folder: Path) -> str:
    return (write_byte_tokenizer(folder, sorted(SPECIAL_TOKENS.values())) / TOKENIZER).read_text()


def vocabulary(more: dict[str, int]) -> Callable[[Path], object]:
    return lambda path: write_byte_tokenizer(path.parent, sorted(SPECIAL_TOKENS.values()), more)


def added(count: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": 256 + i, "content": f"<|{i}|>", **flags} for i in range(count)]


def header(values: dict[str, Any], size: int = 0) -> Callable[[Path], object]:
    """A safetensors file with a hole in the place of its tensors."""
    head = json.dumps(values).encode()
    return sparse(8 + len(head) + size, struct.pack("<Q", len(head)) + head)


def one_tensor(name: str) -> Callable[[Path], object]:
    return header({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1)


def gguf(body: bytes, num_tensors: int = 0, num_values: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + body


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


def factors(rank: int, values: dict[str, Any] | None = None) -> Callable[[Path], object]:
    """An adapter of one module in a file with a hole. `values`: its configuration."""
    queries, hidden = BYTES.num_attention_heads * BYTES.head_dim, BYTES.hidden_size
    ends = [0, 4 * rank * hidden, 4 * rank * (hidden + queries)]
    shapes = {"A": [rank, hidden], "B": [queries, rank]}
    found = {
        f"{QUERY}.lora_{part}.weight": {"dtype": "F32", "shape": shape, "data_offsets": ends[i : i + 2]}
        for i, (part, shape) in enumerate(shapes.items())
    }

    def make(path: Path) -> None:
        (path.parent / ADAPTER).write_text(json.dumps(values or PLAIN_ADAPTER))
        header(found, ends[-1])(path.parent / LORA)

    return make


def manifest(layers: Any) -> Callable[[Path], object]:
    return text(json.dumps({"layers": layers}))


def layer(digest: str) -> dict[str, str]:
    return {"mediaType": "application/vnd.ollama.image.model", "digest": digest}


BOMB = '{"a":' + "[" * 200_000
MODELS = [
    Hostile("a pipe for config.json", CONFIG, os.mkfifo),
    Hostile("a link to itself", CONFIG, link(CONFIG)),
    Hostile("a link to nothing", CONFIG, link("nothing")),
    Hostile("a link to a device", CONFIG, link("/dev/zero")),
    Hostile("a folder for config.json", CONFIG, Path.mkdir),
    Hostile("a config.json of 200 MB", CONFIG, sparse(200_000_000, b"{")),
    Hostile("an empty config.json", CONFIG, data(b"")),
    Hostile("a list for config.json", CONFIG, text("[1]")),
    Hostile("a bomb of lists", CONFIG, text(BOMB)),
    Hostile("objects 100 deep", CONFIG, text('{"a":' * 100 + "1" + "}" * 100)),
    Hostile("config.json in UTF-16", CONFIG, text("{}", "utf-16")),
    Hostile("config.json in Latin 1", CONFIG, text('{"a": "é"}', "latin-1")),
    Hostile("a number of 100,000 digits", CONFIG, changed(hidden_size=("9" * 100_000,))),
    Hostile("a number beyond all floats", CONFIG, changed(rms_norm_eps=("9" * 400,))),
    Hostile("theta NaN", CONFIG, changed(rope_theta=("NaN",))),
    Hostile("a factor of infinity", CONFIG, rope("factor", "1e999")),
    Hostile("a negative size", CONFIG, changed(hidden_size=-64)),
    Hostile("no heads", CONFIG, changed(num_key_value_heads=0)),
    Hostile("a billion layers", CONFIG, changed(num_hidden_layers=10**9, layer_types=None)),
    Hostile("a text for a number", CONFIG, changed(head_dim="16")),
    Hostile("escapes in a value", CONFIG, changed(model_type=LONG)),
    Hostile("escapes in a key of infinity", CONFIG, text(json.dumps({LONG: float("inf")}))),
    Hostile("a list for rope_scaling", CONFIG, changed(rope_scaling=[])),
    Hostile("a pipe for the index", INDEX, os.mkfifo),
    Hostile("a bomb for the index", INDEX, text(BOMB)),
    Hostile("a list for the weight map", INDEX, text('{"weight_map": []}')),
    Hostile("an index that leads out", INDEX, text('{"weight_map": {"a": "../../etc/passwd"}}')),
    Hostile("escapes in the index", INDEX, text(json.dumps({"weight_map": {LONG[:500_000]: RED}}))),
    Hostile("a null in the name of a file", INDEX, text(json.dumps({"weight_map": {"a": "a\0b"}}))),
    Hostile("a pipe for weights", SINGLE, os.mkfifo),
    Hostile("a device for weights", SINGLE, link("/dev/zero")),
    Hostile("empty weights", SINGLE, data(b"")),
    Hostile("a header of an exabyte", SINGLE, sparse(1 << 40, struct.pack("<Q", 1 << 60))),
    Hostile("a name of 10 MB", SINGLE, one_tensor("x" * 10_000_000)),
    Hostile("escapes in the name of a tensor", SINGLE, one_tensor(LONG)),
    Hostile("a pipe for the tokenizer", TOKENIZER, os.mkfifo),
    Hostile("a tokenizer.json of 200 MB", TOKENIZER, sparse(200_000_000)),
    Hostile("a bomb for the tokenizer", TOKENIZER, text(BOMB)),
    Hostile(
        "a tokenizer that panics",
        TOKENIZER,
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AA"}),
    ),
    Hostile("300,000 added tokens", TOKENIZER, tokenizer(added_tokens=added(300_000))),
    Hostile("an id of 2^28", TOKENIZER, vocabulary({"far": 1 << 28})),
    Hostile(
        "a vocabulary of nothing",
        TOKENIZER,
        tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]),
    ),
]
GGUF_FILES = [
    Hostile("a pipe for GGUF", "model.gguf", os.mkfifo),
    Hostile("2^60 values", "model.gguf", data(gguf(b"", num_values=1 << 60))),
    Hostile("2^60 tensors", "model.gguf", data(gguf(b"", 1 << 60, 0))),
    Hostile("a text of 2^60 bytes", "model.gguf", data(gguf(key(b"a", 8) + struct.pack("<Q", 1 << 60)))),
    Hostile(
        "2^40 numbers in a hole", "model.gguf", sparse(1 << 41, gguf(key(b"a", 9) + struct.pack("<IQ", 0, 1 << 40)))
    ),
    Hostile("2^40 texts in a hole", "model.gguf", sparse(1 << 41, gguf(key(b"a", 9) + struct.pack("<IQ", 8, 1 << 37)))),
    Hostile("2^31 dimensions", "model.gguf", data(gguf(struct.pack("<QI", 0, 1 << 31), 1, 0))),
    Hostile(
        "escapes in metadata",
        "model.gguf",
        data(gguf(key(b"general.architecture", 8) + struct.pack("<Q", len(LONG)) + LONG.encode())),
    ),
]
MANIFESTS = [
    Hostile("a bomb for a manifest", "20b", text(BOMB)),
    Hostile("a manifest of 200 MB", "20b", sparse(200_000_000)),
    Hostile("a number for layers", "20b", manifest(1)),
    Hostile("a digest that leads out", "20b", manifest([layer("sha256:../../etc/passwd")])),
    Hostile("a digest of 1 MB", "20b", manifest([layer("sha256:" + "a" * 1_000_000)])),
    Hostile("escapes in a digest", "20b", manifest([layer(LONG)])),
]
ADAPTERS = [
    Hostile("a bomb for the adapter", ADAPTER, text(BOMB)),
    Hostile("a pipe for the adapter", ADAPTER, os.mkfifo),
    Hostile("alpha infinite", ADAPTER, factors(2, PLAIN_ADAPTER | {"lora_alpha": float("inf")})),
    Hostile("another rank", LORA, factors(16)),
    Hostile("factors of 6 GB", LORA, factors(12_000_000, {"r": 12_000_000, "lora_alpha": 1})),
    Hostile("escapes in a factor", LORA, lambda path: (factors(2)(path), one_tensor(LONG)(path))),
]
COPIES = [
    Hostile("a device beside the weights", GENERATION, link("/dev/zero")),
    Hostile("a pipe beside the weights", GENERATION, os.mkfifo),
    Hostile("a template of 200 MB", TEMPLATE, sparse(200_000_000)),
]


def model_in(folder: Path, without: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    if not (weights := folder.parent / SINGLE).exists():
        save_file(tensors(BYTES), weights)
    (folder / CONFIG).write_text(json.dumps(BYTES.to_dict()))
    tokenizer_text(folder)
    os.link(weights, folder / SINGLE)
    if without:
        (folder / without).unlink(missing_ok=True)
    return folder


def open_as_serve_does(model: Path | str, **more: str) -> None:
    options = ModelOptions(str(model), device="cpu", **more)
    tokenizer = tokenizer_folder(EngineOptions(options))
    opened = open_model(options)
    Tokenizer(tokenizer)
    GrammarCache(tokenizer / TOKENIZER, opened.config.vocab_size).markers  # noqa: B018


def of_model(folder: Path, hostile: Hostile) -> None:
    hostile.make(model_in(folder, hostile.file) / hostile.file)
    open_as_serve_does(folder)


def of_gguf(folder: Path, hostile: Hostile) -> None:
    hostile.make(folder / hostile.file)
    open_as_serve_does(folder, tokenizer=str(NANO_FOLDER))


def of_manifest(folder: Path, hostile: Hostile) -> None:
    path = folder / MANIFEST
    path.parent.mkdir(parents=True)
    (folder / "blobs").mkdir()
    hostile.make(path)
    os.environ["OLLAMA_MODELS"] = str(folder)
    open_as_serve_does("gpt-oss:20b")


def of_adapter(folder: Path, hostile: Hostile) -> None:
    adapter = folder / "adapter"
    adapter.mkdir()
    hostile.make(adapter / hostile.file)
    options = ModelOptions(str(model_in(folder)), device="cpu")
    convert(options, folder / "out", lora=adapter, quiet=True)


def of_copy(folder: Path, hostile: Hostile) -> None:
    hostile.make(model_in(folder) / hostile.file)
    convert(ModelOptions(str(folder), device="cpu"), folder / "out", quiet=True)


KINDS: list[tuple[list[Hostile], Callable[[Path, Hostile], None]]] = [
    (MODELS, of_model),
    (GGUF_FILES, of_gguf),
    (MANIFESTS, of_manifest),
    (ADAPTERS, of_adapter),
    (COPIES, of_copy),
]
ALL = [hostile for cases, _ in KINDS for hostile in cases]


def main(folder: Path) -> None:
    for number, (hostile, open_it) in enumerate((one, open_it) for cases, open_it in KINDS for one in cases):
        own = folder / str(number)
        own.mkdir()
        began_s = time.process_time()
        said = {"name": hostile.name, "error": "none", "message": ""}
        try:
            open_it(own, hostile)
        except BaseException as error:
            said |= {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(said | {"seconds": time.process_time() - began_s}))
    print(json.dumps({"peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """Of this process alone: getrusage would count what the process had before it ran this program."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
