"""From command lines and YAML files to a Config."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.serve import dialects
from oscine.cli.serve.options import ALIASES, FLAGS, NAMES, OPPOSITES, settings
from oscine.cli.serve.read_options import add_options, read_config
from oscine.config import Config

GOLDEN = Path(__file__).parent / "serve_options.txt"


def parser() -> Parser:
    parser = Parser(prog="oscine serve", allow_abbrev=False)
    add_options(parser)
    return parser


def config_of(*arguments: str) -> Config:
    return read_config(vars(parser().parse_args(arguments)))


def test_the_options_are_a_decision() -> None:
    """An option that comes or goes must be written into serve_options.txt as well."""
    actions = [action for action in parser()._actions if not isinstance(action, argparse._HelpAction)]
    assert [" ".join(action.option_strings) or action.dest for action in actions] == GOLDEN.read_text().splitlines()
    assert all(action.help for action in actions)


def test_the_help_says_what_each_option_is_by_default() -> None:
    """Except for flags, and for options that are absent unless given."""
    absent = {"random-weights", "kv-cache-free-gpu-memory-fraction", "api-keys-file", "browser-folder"}
    absent |= {"browser-backend", "mcp-servers"}
    for name in NAMES - FLAGS - absent:
        assert settings(name)["help"].endswith(")"), name
        assert "(default: " in settings(name)["help"], name
    assert settings("max-num-seqs")["help"] == "most sequences that run at once (default: 64)"
    assert settings("max-body-bytes")["help"].endswith("(default: 4MiB)")


def test_names_of_other_servers_are_in_the_whole_help_only(capsys: pytest.CaptureFixture[str]) -> None:
    for option, shown in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as caught:
            parser().parse_args([option])
        assert caught.value.code == 0
        said = capsys.readouterr().out
        names = set(re.findall(r"^  --([\w-]+)", said, re.MULTILINE))
        assert names >= NAMES
        theirs = {name for name in (*ALIASES, *OPPOSITES, *dialects.NAMES) if "." not in name}
        assert names & theirs == (theirs if shown else set())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-num-seq", "3"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["--prot=80"], "--prot=80; did you mean --port?"),
        (["--no-such-thing"], "--no-such-thing (see"),
        (
            ["--dtype", "bfloat"],
            "--dtype: it must be one of auto, float32, bfloat16, not 'bfloat'; did you mean bfloat16?",
        ),
        (["--profile", "low-latency"], "did you mean low_latency?"),
        (["--kv-cache-bytes", "1 gigabyte"], "--kv-cache-bytes: it must be a number of bytes such as"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_was_probably_meant_is_said(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)):
        config_of(*arguments)


def test_what_a_key_of_a_file_probably_means_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_model_length: 5")
    with pytest.raises(CommandError, match=r"unknown key 'max_model_length'; did you mean max-model-len\?"):
        config_of("--config", str(path))


def test_sizes_are_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("kv-cache-bytes: 1GB\nmax-model-len: 128K")
    assert config_of("--config", str(path)) == config_of("--kv-cache-bytes", "1000000000", "--max-model-len", "131072")


def test_nothing_given_is_the_defaults() -> None:
    assert config_of() == Config()


def test_every_part_of_the_config_is_reached() -> None:
    config = config_of(
        *("a-folder", "--max-model-len", "512", "--dtype", "bfloat16", "--page-size", "16", "--no-prefix-caching"),
        *("--max-num-seqs", "3", "--executor", "fake", "--fake-step-s", "0.5", "--port", "0", "--date", "2025-08-05"),
        *("--gpu-memory-utilization", "0.5", "--enforce-eager"),
        *("--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k2", "--reasoning-field", "both"),
    )
    model, cache, scheduler, server = config.engine.model, config.engine.cache, config.engine.scheduler, config.server
    assert (model.model, model.max_model_len, model.dtype) == ("a-folder", 512, "bfloat16")
    assert (cache.page_size, cache.prefix_caching, cache.gpu_memory_utilization) == (16, False, 0.5)
    assert not config.engine.cuda_graphs
    assert scheduler.max_num_seqs == 3
    assert (config.engine.executor, config.engine.fake_step_s) == ("fake", 0.5)
    assert (server.port, server.date, server.reasoning_field) == (0, "2025-08-05", "both")
    assert (server.served_model_names, server.api_keys) == (("a", "b"), ("k1", "k2"))


YAML = """
model: a-folder
max_num_seqs: 7          # either spelling
max-model-len: 4096
no-prefix-caching: true
served-model-name: [a, b]
api_key: 12345
drain-s: 1.5
"""


def test_a_yaml_file_says_the_same_as_a_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    assert config_of("--config", str(path)) == config_of(
        *("a-folder", "--max-num-seqs", "7", "--max-model-len", "4096", "--no-prefix-caching"),
        *("--served-model-name", "a", "b", "--api-key", "12345", "--drain-s", "1.5"),
    )


def test_tools_are_named_in_one_word_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("tools: [python, browser]\nbrowser-folder: docs\nallow-mcp-urls: true\npython-timeout-s: 5")
    config = config_of("--config", str(path))
    given = ("--tools", "python,browser", "--browser-folder", "docs", "--allow-mcp-urls", "--python-timeout-s", "5")
    assert config == config_of(*given)
    assert (config.tools.tools, config.tools.allow_mcp_urls) == (("python", "browser"), True)
    with pytest.raises(CommandError, match="--tools must be of python and browser"):
        config_of("--tools", "python,shell")


def test_a_date_in_yaml_needs_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("date: 2025-08-05")
    assert config_of("--config", str(path)) == config_of("--date", "2025-08-05")


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    config = config_of("other", "--config", str(path), "--max-num-seqs", "9", "--served-model-name", "c")
    assert config.engine.model.model == "other"
    assert config.engine.scheduler.max_num_seqs == 9
    assert config.server.served_model_names == ("c",)
    assert config.engine.model.max_model_len == 4096


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_seqs: 7", "max_seqs"),
        ("config: other.yaml", "config"),
        ("port: high", "--port"),
        ("port: [1, 2]", "port"),
        ("port:", "port"),
        ("port: {a: 1}", "port"),
        ("port: true", "port"),
        ("no-prefix-caching: 1", "no-prefix-caching"),
        ("dtype: float64", "--dtype"),
        ("page-size: 17", "--page-size"),
        ("- a list", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(CommandError, match=named) as caught:
        config_of("--config", str(path))
    assert caught.value.status == USAGE


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "99999"], "--port"),
        (["--port", "x"], "--port"),
        (["--prot", "80"], "--prot"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-batched-tokens", "8"], "--max-num-batched-tokens"),
        (["--date", "today"], "--date"),
        (["--api-key", "k", "--api-key", ""], "--api-key"),
        (["--cors-origins", "https://example.org", "example.org"], "--cors-origins .* 'example.org'"),
        (["--cors-origins", "https://example.org/"], "--cors-origins"),
        (["--cors-origins", "https://"], "--cors-origins"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["a", "b"], "b"),
        (["a", "--random-weights", "20b"], "--random-weights"),
    ],
)
def test_a_bad_command_line_is_an_error_that_names_the_option(arguments: list[str], named: Any) -> None:
    with pytest.raises(CommandError, match=named) as caught:
        config_of(*arguments)
    assert caught.value.status == USAGE
    assert "\n" not in str(caught.value)
