"""From command lines and YAML files to a Config."""

import re
from pathlib import Path
from typing import Any

import pytest

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.serve.options import ALIASES, OPPOSITES, add_options
from oscine.cli.serve.read_options import read_config
from oscine.extensions.apis.conventions import other_servers as dialects
from oscine.settings.config import OPTIONS, STREAMED_TOKENS, Config, EngineOptions, SchedulerOptions
from oscine.settings.devices import engines_of
from tests.cli.option_table import tables

CONFIGURATION = Path(__file__).parents[2] / "docs" / "configuration.md"


def parser() -> Parser:
    parser = Parser(prog="oscine serve", allow_abbrev=False)
    add_options(parser)
    return parser


def config_of(*arguments: str) -> Config:
    return read_config(vars(parser().parse_args(arguments)))


def test_each_option_has_a_help() -> None:
    assert all(action.help for action in parser()._actions)


def test_the_help_says_what_each_option_is_by_default() -> None:
    """Except for flags, and for options that are absent unless given."""
    absent = {"random-weights", "kv-cache-free-gpu-memory-fraction", "api-keys-file", "browser-folder"}
    absent |= {"browser-backend", "mcp-servers"}
    for name, option in OPTIONS.items():
        assert option.help_text.endswith(")") == (not option.is_flag and name not in absent), name
        assert ("(default: " in option.help_text) == option.help_text.endswith(")"), name
    assert OPTIONS["max-num-seqs"].help_text == (
        "most sequences that run at once (default: on a GPU as many as its memory holds, up to 512; else 64)"
    )
    assert OPTIONS["max-body-bytes"].help_text.endswith("(default: 4MiB)")


def test_the_documents_list_the_options() -> None:
    """Where this fails, `python -m tests.cli.option_table` prints what docs/configuration.md has to say."""
    said = CONFIGURATION.read_text()
    assert said.endswith("\n".join(tables()).strip() + "\n")


def test_the_documents_say_what_names_of_other_servers_mean() -> None:
    means = {**ALIASES, **OPPOSITES, "model": "MODEL", "model-path": "MODEL", "load-format": "random-weights"}
    means["cuda-graph-config"] = "enforce-eager"
    table = CONFIGURATION.read_text().partition("| option of another server | option of ours |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    assert len(rows) > 10
    for theirs, ours in rows:
        for name in re.findall(r"`(?:--)?([\w.-]+)", theirs):
            (meant, *_) = re.findall(r"`--([\w-]+)`|(MODEL)", ours)
            assert means[name.replace("_", "-")] in meant


def test_names_of_other_servers_are_in_the_whole_help_only(capsys: pytest.CaptureFixture[str]) -> None:
    for option, shown in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as caught:
            parser().parse_args([option])
        assert caught.value.code == 0
        said = capsys.readouterr().out
        names = set(re.findall(r"^  --([\w-]+)", said, re.MULTILINE))
        assert names >= OPTIONS.keys() - {"model"}
        theirs = {name for name in ("model", *ALIASES, *OPPOSITES, *dialects.NAMES) if "." not in name}
        assert names & theirs == (theirs if shown else set())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-num-seq", "3"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["--prot=80"], "--prot=80; did you mean --port?"),
        (["--no-such-thing"], "--no-such-thing (see"),
        (["-p", "80"], "unrecognized arguments: -p (see"),
        (
            ["--dtype", "bfloat"],
            "--dtype: it must be auto, float32 or bfloat16, not 'bfloat'; did you mean bfloat16?",
        ),
        (["--profile", "low-latency"], "did you mean low_latency?"),
        (["--kv-cache-bytes", "1 gigabyte"], "--kv-cache-bytes: it must be a number of bytes such as"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_was_probably_meant_is_said(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)):
        config_of(*arguments)


@pytest.mark.parametrize(
    ("kind", "given", "said"), [(int, "1.5", "a whole number, not '1.5'"), (float, "x", "a number, not 'x'")]
)
def test_numbers_of_every_command_are_refused_in_the_same_words(kind: type, given: str, said: str) -> None:
    parser = Parser(prog="oscine sing")
    parser.add_argument("--pitch", type=kind)
    with pytest.raises(CommandError, match=rf"^argument --pitch: it must be {said} \(see oscine sing --help\)$"):
        parser.parse_args(["--pitch", given])


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
    left = SchedulerOptions(by_memory=("max_num_seqs", "max_num_batched_tokens"))
    assert config_of() == Config(EngineOptions(scheduler=left))


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


def test_experts_on_host_raise_the_default_of_batched_tokens() -> None:
    assert config_of("m", "--experts-on-host", "auto").engine.scheduler.max_num_batched_tokens == STREAMED_TOKENS
    config = config_of("m", "--experts-on-host", "3", "--max-num-batched-tokens", "512", "--gpu-memory-bytes", "16GB")
    assert config.engine.scheduler.max_num_batched_tokens == 512
    assert (config.engine.model.experts_on_host, config.engine.cache.gpu_memory_bytes) == ("3", 16 * 10**9)


@pytest.mark.parametrize(
    ("arguments", "num_gpus", "threads"),
    [
        ((), 0, 4),
        (("--threads", "6"), 0, 3),
        (("--experts-on-host", "auto"), 2, 4),
        (("--experts-on-host", "auto", "--threads", "6"), 2, 3),
        ((), 2, None),
    ],
)
def test_engines_that_compute_on_the_cpu_share_its_cores(
    arguments: tuple[str, ...], num_gpus: int, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscine.settings.devices.default_threads", lambda: 8)
    engines = engines_of(config_of("m", "--data-parallel-size", "2", *arguments), num_gpus)
    assert [engine.num_threads for engine in engines] == [threads] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--experts-on-host", "some"), "--experts-on-host: it must be auto, or a number of layers, not 'some'"),
        (("--responses-db", ""), "--responses-db: it must be a path, not ''"),
        (("--served-model-name", "a", ""), "--served-model-name: it must be a name with characters, not ''"),
        (
            ("--experts-on-host", "auto", "--tensor-parallel-size", "2"),
            "--experts-on-host needs --tensor-parallel-size 1, not 2",
        ),
        (
            ("--gpu-memory-bytes", "16GB", "--gpu-memory-utilization", "0.5"),
            "--gpu-memory-bytes and --gpu-memory-utilization exclude each other",
        ),
    ],
)
def test_wrong_values_of_options_for_small_gpus(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)):
        config_of("m", *arguments)


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
    with pytest.raises(CommandError, match="--tools: it must be python or browser, not 'shell'"):
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
        ("max_seqs: 7", "unknown key 'max_seqs'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("port: high", "port must be a whole number, not 'high'"),
        ("port: 99999", "port must be between 0 and 65535, not 99999"),
        ("port: 80.5", "port must be a whole number, not 80.5"),
        ("port: [1, 2]", r"port must be a whole number, not \[1, 2\]"),
        ("port:", "port must be a whole number, not null"),
        ("port: {a: 1}", "port must be a whole number, not {'a': 1}"),
        ("port: true", "port must be a whole number, not true"),
        ("drain_s: soon", "drain_s must be a number, not 'soon'"),
        ("host: [a, b]", r"host must be text, not \['a', 'b'\]"),
        ("api_key: [a, {b: c}]", "api_key must be text, not {'b': 'c'}"),
        ("max_num_tokens: 5B", "max_num_tokens must be a number of tokens such as .*, not '5B'"),
        ("no-prefix-caching: 1", "no-prefix-caching must be true or false, not 1"),
        ("dtype: float64", "dtype must be auto, float32 or bfloat16, not 'float64'"),
        ("dtype: bfloat", "not 'bfloat'; did you mean bfloat16"),
        ("page-size: 17", "page-size must be 16, 32, 64 or 128, not 17"),
        ("- a list", "mapping"),
        (
            "port: 1\na: [",
            "is not YAML: line 2: expected the node content, but found '<stream end>' while parsing a flow",
        ),
        ("port: 1\na: \x00", "is not YAML: line 2: unacceptable character #x0000: special"),
        ("port: 1\nhost: a\nport: 1", "is not YAML: line 3: port is there twice"),
        ("speculative_config: {method: ngram, method: eagle3}", "is not YAML: line 1: method is there twice"),
        ("max-num-seqs: 3\nmax_num_seqs: 4", "max_num_seqs is there twice, with hyphens and with underscores"),
        ("a: 2024-99-99", "is not YAML: month must be"),
        ("[" * 3000, "is not YAML: it is nested too deeply"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(CommandError, match=f"--config {path}:? .*{named}") as caught:
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
        (["--cors-origins", "https://example.org", "example.org"], "--cors-origins: it must be .* not 'example.org'"),
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
