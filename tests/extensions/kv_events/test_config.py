"""vLLM's --kv-events-config, on the command line and in a file."""

import re
from pathlib import Path

import pytest

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_options
from oscine.cli.serve.read_options import read_config
from oscine.settings.config import PeerOptions

FULL = """{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:6000", "topic": "kv@a@b",
    "replay_endpoint": "tcp://*:6001", "buffer_steps": 7, "unauthenticated": true}"""


def peers_of(*arguments: str) -> tuple[PeerOptions, list[str]]:
    """What becomes of engines' peers, and what was said to have no effect."""
    parser = Parser(prog="oscine serve", allow_abbrev=False)
    add_options(parser)
    notes: list[str] = []
    return read_config(vars(parser.parse_args(arguments)), notes.append).engine.peers, notes


def test_every_key() -> None:
    expected = PeerOptions(
        kv_events=True,
        kv_events_topic="kv@a@b",
        kv_events_endpoint="tcp://*:6000",
        kv_replay_endpoint="tcp://*:6001",
        kv_events_kept=7,
        kv_events_open=True,
    )
    assert peers_of("--kv-events-config", FULL) == (expected, [])
    assert peers_of(f"--kv_events_config={FULL}") == (expected, [])


def test_what_is_not_given_is_as_in_vllm_but_for_the_topic() -> None:
    peers, notes = peers_of("--kv-events-config", '{"enable_kv_cache_events": true}')
    assert (peers.kv_events_endpoint, peers.kv_replay_endpoint, peers.kv_events_kept) == ("tcp://*:5557", None, 10000)
    assert peers.kv_events
    assert peers.kv_events_topic == "kv-events"
    assert peers.host is None
    assert not peers.kv_events_open
    assert notes == []


@pytest.mark.parametrize("text", ["{}", '{"endpoint": "tcp://*:1"}', FULL.replace('"zmq"', '"null"')])
def test_nothing_is_published_unless_it_is_wanted(text: str) -> None:
    assert peers_of("--kv-events-config", text) == (PeerOptions(), [])


ENABLED = '{"enable_kv_cache_events": true, '


@pytest.mark.parametrize("endpoint", ["tcp://*:6000", "tcp://[::]:6000", "tcp://192.0.2.1:*"])
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_listening_on_a_network_has_to_be_said(endpoint: str, key: str) -> None:
    with pytest.raises(CommandError, match=f'{key} {re.escape(endpoint)}: .* "unauthenticated": true') as caught:
        peers_of("--kv-events-config", f'{ENABLED}"{key}": "{endpoint}"}}')
    assert caught.value.status == USAGE
    peers, _ = peers_of("--kv-events-config", f'{ENABLED}"unauthenticated": true, "{key}": "{endpoint}"}}')
    assert peers.kv_events_open


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://[::1]:6000", "ipc:///tmp/x", "tcp://router:5557"])
def test_this_machine_alone_and_what_is_connected_need_no_word(endpoint: str) -> None:
    peers, _ = peers_of("--kv-events-config", f'{ENABLED}"endpoint": "{endpoint}"}}')
    assert peers.kv_events_endpoint == endpoint


def test_keys_of_vllms_queue_have_no_effect() -> None:
    _, notes = peers_of("--kv-events-config", '{"enable_kv_cache_events": true, "hwm": 5, "max_queue_size": 6}')
    assert [note.partition(" has no effect")[0] for note in notes] == [
        "kv_events_config.hwm",
        "kv_events_config.max_queue_size",
    ]


@pytest.mark.parametrize("text", [FULL, f"'{' '.join(FULL.split())}'"])
def test_a_file_says_it_as_a_mapping_or_as_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"kv_events_config: {text}")
    assert peers_of("--config", str(path)) == peers_of("--kv-events-config", FULL)
    other = '{"enable_kv_cache_events": true}'
    assert peers_of("--config", str(path), "--kv-events-config", other) == peers_of("--kv-events-config", other)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("yes", "it is not JSON"),
        ("[]", "it must be an object"),
        ('{"enable": true}', "it is refused: unknown key 'enable'"),
        ('{"enable_kv_cache_events": 1}', "it is refused: enable_kv_cache_events must be true or false, not 1"),
        ('{"buffer_steps": true}', "it is refused: buffer_steps must be a whole number, not true"),
        ('{"buffer_steps": -1}', "it is refused: buffer_steps must be at least 0, not -1"),
        ('{"endpoint": null}', "it is refused: endpoint must be text, not null"),
        ('{"publisher": "nats"}', "it is refused: publisher must be zmq or null, not 'nats'"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(CommandError, match=f"--kv-events-config: {named}") as caught:
        peers_of("--kv-events-config", text)
    assert caught.value.status == USAGE
