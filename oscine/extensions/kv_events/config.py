"""`--kv-events-config`: vLLM's JSON for events of the KV cache, as our PeerOptions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oscine.settings.config import PeerOptions
from oscine.settings.name import Values, note
from oscine.settings.option import FileKeyError, OptionError, Options, did_you_mean, option, options_of
from oscine.system.addresses import is_loopback, listens

_NAME = "kv-events-config"


@dataclass(frozen=True)
class _KVEventsConfig(Options, group=_NAME):
    """vLLM's keys, with vLLM's defaults but for the topic; `unauthenticated` is ours."""

    enable_kv_cache_events: bool = option(False, "whether events are published")
    publisher: Literal["zmq", "null"] | None = option(None, 'how they are published; "null" for not at all')
    endpoint: str = option("tcp://*:5557", "where subscribers connect: bound where there is a *, else connected")
    replay_endpoint: str | None = option(None, "where a subscriber asks for messages that it missed")
    buffer_steps: int = option(PeerOptions.kv_events_kept, "messages that are kept for that", at_least=0)
    topic: str = option(PeerOptions.kv_events_topic, "first frame of each message")
    unauthenticated: bool = option(False, "allow endpoints that other machines can reach")
    hwm: int | None = option(None, "what a slow subscriber misses is asked for again")
    max_queue_size: int | None = option(None, "events wait for nothing before they are sent")


_KEYS = {option.field: option for option in options_of(_KVEventsConfig)}
_IGNORED = ("hwm", "max_queue_size")


def read_kv_events_config(value: Any) -> Values:
    """`peers` of EngineOptions, from JSON or a mapping, and a note for each key that has no effect."""
    try:
        given = value if isinstance(value, dict) else json.loads(str(value))
    except ValueError as error:
        raise OptionError(_NAME, f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise OptionError(_NAME, "must be an object")
    try:
        peers = _peers(_read(given), set(given))
    except ValueError as error:
        raise OptionError(_NAME, f"is refused: {error}") from None
    ignored = (f"kv_events_config.{key} has no effect: {_KEYS[key].help}" for key in _IGNORED if key in given)
    return {_NAME: peers} | note(*ignored)


def _read(given: Mapping[str, Any]) -> _KVEventsConfig:
    """Raises ValueError that names the key."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}{did_you_mean(key, _KEYS)}")
        try:
            values[key] = None if value is None and _KEYS[key].default is None else _KEYS[key].read(value)
        except OptionError as error:
            raise FileKeyError(key, error.rule) from None
    return _KVEventsConfig(**values)


def _peers(config: _KVEventsConfig, given: set[str]) -> PeerOptions:
    """Raises ValueError that names the key."""
    if not config.enable_kv_cache_events or config.publisher == "null":
        return PeerOptions()
    for key in ("endpoint", "replay_endpoint"):
        if key in given and not config.unauthenticated:
            _check_reach(key, getattr(config, key) or "")
    return PeerOptions(
        kv_events=True,
        kv_events_topic=config.topic,
        kv_events_endpoint=config.endpoint,
        kv_events_open=config.unauthenticated,
        kv_replay_endpoint=config.replay_endpoint,
        kv_events_kept=config.buffer_steps,
    )


def _check_reach(key: str, endpoint: str) -> None:
    """Raises ValueError for an endpoint that other machines reach: events contain prompts, and have no keys."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if endpoint.startswith("tcp://") and listens(endpoint) and not is_loopback(host):
        raise ValueError(
            f"{key} {endpoint}: every process that reaches it could read prompts; leave it out to keep events on this "
            'machine, or allow it with "unauthenticated": true'
        )
