"""`--kv-events-config`: vLLM's JSON for events of the KV cache, as our PeerOptions.

Knows vLLM's keys and their defaults; not what is published.
"""

import json
from typing import Any

from oscine.cli.serve.name import Values, note
from oscine.config import PeerOptions, is_loopback, listens
from oscine.option import OptionError

_KINDS: dict[str, tuple[type, ...]] = {
    "enable_kv_cache_events": (bool,),
    "publisher": (str, type(None)),
    "endpoint": (str,),
    "replay_endpoint": (str, type(None)),
    "buffer_steps": (int,),
    "hwm": (int,),
    "max_queue_size": (int,),
    "topic": (str,),
    "unauthenticated": (bool,),  # ours
}
_IGNORED = {
    "hwm": "what a slow subscriber misses is asked for again",
    "max_queue_size": "events wait for nothing before they are sent",
}


def read_kv_events_config(value: Any) -> Values:
    """`peers` of EngineOptions, from JSON or a mapping, and a note for each key that has no effect."""
    name = "kv-events-config"
    try:
        config = value if isinstance(value, dict) else json.loads(str(value))
    except ValueError as error:
        raise OptionError(name, f"is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise OptionError(name, "must be an object")
    try:
        _check(config)
        peers = _peers(config)
    except ValueError as error:
        raise OptionError(name, f"is refused: {error}") from None
    ignored = (f"kv_events_config.{key} has no effect: {why}" for key, why in _IGNORED.items() if key in config)
    return {name: peers} | note(*ignored)


def _check(config: dict[str, Any]) -> None:
    """Raises ValueError that names the key."""
    for key, value in config.items():
        if key not in _KINDS:
            raise ValueError(f"unknown key {key!r}")
        if type(value) not in _KINDS[key]:  # not isinstance: true is no number
            raise ValueError(f"{key} cannot be {json.dumps(value)}")
    if config.get("publisher") not in (None, "zmq", "null"):
        raise ValueError(f'publisher must be "zmq" or "null", not {json.dumps(config["publisher"])}')
    if config.get("buffer_steps", 0) < 0:
        raise ValueError(f"buffer_steps must be at least 0, not {config['buffer_steps']}")


def _check_reach(key: str, config: dict[str, Any]) -> None:
    """Raises ValueError for an endpoint that other machines reach: events contain prompts, and have no keys."""
    endpoint = config.get(key) or ""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    reached = endpoint.startswith("tcp://") and listens(endpoint) and not is_loopback(host)
    if reached and not config.get("unauthenticated", False):
        raise ValueError(
            f"{key} {endpoint}: every process that reaches it could read prompts; leave it out to keep events on this "
            'machine, or allow it with "unauthenticated": true'
        )


def _peers(config: dict[str, Any]) -> PeerOptions:
    """Raises ValueError that names the key."""
    default = PeerOptions()
    if not config.get("enable_kv_cache_events", False) or config.get("publisher") == "null":
        return default
    for key in ("endpoint", "replay_endpoint"):
        _check_reach(key, config)
    return PeerOptions(
        kv_events=True,
        kv_events_topic=config.get("topic", default.kv_events_topic),
        kv_events_endpoint=config.get("endpoint", "tcp://*:5557"),
        kv_events_open=config.get("unauthenticated", False),
        kv_replay_endpoint=config.get("replay_endpoint"),
        kv_events_kept=config.get("buffer_steps", default.kv_events_kept),
    )
