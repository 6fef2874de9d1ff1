"""Documents name files that exist and commands that the command line takes; figures and tables come from the code."""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from oscine.api.apis import make_service
from oscine.api.openapi import plain_path
from oscine.api.routes import endpoints
from oscine.cli import whole_parser
from oscine.cli.serve.read_options import read_config
from oscine.settings.config import Config
from tests.documents import gpu_table
from tests.documents.api_reference import page
from tests.documents.site import CONFIGURATION, DOCS, GENERATED, LEFT_OUT, ROOT, title, write

GUIDE = DOCS / "gpt-oss-120b.md"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("training/*.md")])
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)(?:#[^)]*)?\)")
BEGINNING = re.compile(r"    ([A-Z_]+=\S+ |[A-Z_]+=\$\([^)]*\) )*oscine [a-z]")
UNPARSED = ("--help", "--help-all", "--version", "...")  # end the program, or stand for something


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_name_files_that_exist(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        assert (path.parent / target).exists() or target in GENERATED, f"{path.name}: {target}"


def commands(path: Path) -> Iterator[list[str]]:
    """Words of the `oscine` commands in the indented and fenced blocks of a page."""
    lines = iter(path.read_text().replace("\\\n", " ").splitlines())
    for line in lines:
        if BEGINNING.match(line):
            yield list(takewhile(lambda word: word not in ("|", "&"), whole_command(line, lines)))


def whole_command(line: str, following: Iterator[str]) -> list[str]:
    """The words from `oscine` on. Quoted text may go over several lines."""
    while line.count("'") % 2:
        line += next(following)
    words = shlex.split(line, comments=True)
    return words[words.index("oscine") :]


COMMANDS = [
    pytest.param(words, id=f"{path.name}: {' '.join(words)[:60]}")
    for path in PAGES
    if path.parent.name != "decisions" and path.name != "log.md"
    for words in commands(path)
    if not set(UNPARSED) & set(words)
]


@pytest.mark.long
@pytest.mark.parametrize("words", COMMANDS)
def test_commands_are_those_of_the_command_line(words: list[str]) -> None:
    args = vars(whole_parser().parse_args(words[1:]))
    assert callable(args.pop("run"))
    if words[1] == "serve" and not {"config", "kv-events-config"} & args.keys():
        args.pop("api-keys-file", None)
        read_config(args, note=lambda note: None, num_gpus=8 if "gpus" in args else 1)


def test_the_guide_has_commands_of_each_kind() -> None:
    found = [" ".join(words[1:3]) for words in commands(GUIDE)]
    for kind in ("serve openai/gpt-oss-120b", "bench serve", "bench sweep", "cluster up", "pull gpt-oss-120b"):
        assert kind in found


def test_files_of_options_in_the_guide_are_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    config = read_config({"config": file}, note=lambda note: None, num_gpus=1)
    assert (config.server.host, config.engine.scheduler.max_num_seqs) == ("0.0.0.0", 512)


def test_the_guide_says_what_the_profiles_set() -> None:
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", GUIDE.read_text(), re.MULTILINE))
    profiles = [read_config({"profile": name}).engine.scheduler for name in ("low_latency", "max_throughput")]
    for row, field in {
        "sequences at once": "max_num_seqs",
        "tokens per step": "max_num_batched_tokens",
        "tokens per streamed event": "stream_interval",
    }.items():
        assert rows[row] == " | ".join(f"{getattr(profile, field):,}" for profile in profiles)


@pytest.mark.long
def test_the_table_of_gpus_is_that_of_the_memory_plan() -> None:
    """Where this fails, `python -m tests.documents.gpu_table` prints what docs/gpus.md has to say."""
    text = (DOCS / "gpus.md").read_text()
    assert "\n".join(gpu_table.table()) in text
    assert "\n".join(gpu_table.limits_table()) in text
    assert "\n".join(gpu_table.layouts_table()) in text


# ---- the site ----


def pages_of(navigation: object) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    elif isinstance(navigation, list):
        for entry in navigation:
            yield from pages_of(entry)
    elif isinstance(navigation, dict):
        for entry in navigation.values():
            yield from pages_of(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = sorted(pages_of(yaml.safe_load(CONFIGURATION.read_text())["nav"]))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {LEFT_OUT}
    assert listed == sorted([*GENERATED, *there])


def test_the_reference_has_every_endpoint_and_parameter() -> None:
    text = page()
    for operation in endpoints(make_service(Config())):
        assert f"| `{operation.method} {plain_path(operation)}` |" in text
        for name in getattr(operation.body, "__struct_encode_fields__", ()):
            assert f"`{name}`" in text


def test_links_show_titles(tmp_path: Path) -> None:
    write(tmp_path / "site")
    text = (tmp_path / "site" / "docs" / "index.md").read_text()
    assert ".md](" not in text
    written = (tmp_path / "site" / "docs" / "gpt-oss-120b.md").read_text()
    assert f"[{title(DOCS / 'gpus.md')}](gpus.md)" in written
