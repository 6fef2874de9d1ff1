"""API keys, sent in `Authorization: Bearer KEY` or `X-Api-Key: KEY`. rate_limits has the limits of a key.

Keys are held as their SHA-256.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from oscine.api.common.asgi import ASGIApp, Receive, Scope, Send
from oscine.api.common.errors import APIError
from oscine.api.common.rate_limits import KeyLimits, KeyUse
from oscine.api.common.record import current, header
from oscine.api.common.work import BATCHES, BODIES, REQUESTS
from oscine.settings.config import ServerOptions
from oscine.settings.option import OptionError
from oscine.system.yaml_text import YamlError, parse_yaml

_KEY = "oscine.key"  # in an ASGI scope: the KeyUse of the request
_BATCH = "oscine.batch"  # the same: whether it is a line of a batch
_DIGITS = frozenset("0123456789abcdef")


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One key of the file."""

    name: str
    key: str | None = None
    sha256: str | None = None  # of the key, 64 hexadecimal digits
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    priority: int = 0  # of its requests; lower runs sooner

    def digest(self) -> bytes:
        if self.key:
            return hashlib.sha256(self.key.encode()).digest()
        return bytes.fromhex(self.sha256 or "")

    def problem(self) -> str | None:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_parallel)
        if not self.name:
            return "a key needs a name"
        if (self.key is None) == (self.sha256 is None) or self.key == "":
            return "give either 'key' or 'sha256'"
        if self.sha256 is not None and (len(self.sha256) != 64 or not _DIGITS.issuperset(self.sha256)):
            return "'sha256' must be 64 hexadecimal digits in lower case"
        if any(limit is not None and limit < 1 for limit in limits):
            return "a limit must be at least 1"
        return None if abs(self.priority) < 1 << 30 else "'priority' must be between -2**30 and 2**30"


def _refused(rule: str) -> OptionError:
    return OptionError("api-keys-file", rule)


def _read(path: str) -> list[_Entry]:
    """Raises OptionError, in one line, that says what is wrong where."""
    try:
        content: Any = parse_yaml(Path(path).read_text())
        entries = msgspec.convert(content, list[_Entry])
    except OSError as error:
        raise _refused(f"{path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise _refused(f"{path} must be a list of keys: {error}") from None
    except ValueError as error:  # what it says may show a key
        line = f" (line {error.line})" if isinstance(error, YamlError) else ""
        raise _refused(f"{path} is not YAML{line}") from None
    problems = [f"{entry.name!r}: {problem}" for entry in entries if (problem := entry.problem())]
    names = [entry.name for entry in entries]
    problems += [f"{name!r} is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if len({entry.digest() for entry in entries if not entry.problem()}) < len(names) and not problems:
        problems.append("two names have the same key")
    if problems:
        raise _refused(f"{path}: {problems[0]}")
    return entries


class ApiKeys:
    """All keys of a server. Raises OptionError for a file that cannot be used."""

    def __init__(self, options: ServerOptions) -> None:
        self._path = options.api_keys_file
        # Keys of the command line have no limits.
        plain = {hashlib.sha256(key.encode()).digest(): i for i, key in enumerate(options.api_keys, 1)}
        self._plain = {digest: KeyUse(f"api-key-{i}", KeyLimits()) for digest, i in plain.items()}
        self._by_digest = dict(self._plain)
        self.reload()

    def __bool__(self) -> bool:
        """Whether requests need a key. With an empty file of keys, no request has one."""
        return bool(self._plain) or self._path is not None

    def reload(self) -> None:
        """Reads the file again; keys that stay keep their usage. If it raises ValueError, nothing has changed."""
        if self._path is None:
            return
        entries = _read(self._path)
        if shared := {entry.name for entry in entries} & {use.name for use in self._plain.values()}:
            raise _refused(f"{self._path}: {min(shared)!r} is what a key of --api-key is called")
        known = {use.name: use for use in self._by_digest.values()}
        by_digest = {}
        for entry in entries:
            limits = KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_parallel)
            use = known.get(entry.name) or KeyUse(entry.name, limits, entry.priority)
            use.change(limits, entry.priority)
            by_digest[entry.digest()] = use
        self._by_digest = by_digest | self._plain

    def named(self, name: str) -> KeyUse | None:
        return next((use for use in self._by_digest.values() if use.name == name), None)

    def find(self, scope: Scope) -> KeyUse | None:
        scheme, _, key = header(scope, b"authorization").partition(b" ")
        shown = key.strip() if scheme.lower() == b"bearer" else header(scope, b"x-api-key")
        return self._by_digest.get(hashlib.sha256(shown).digest())


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of one request."""

    key: KeyUse | None = None  # None: the server has no keys
    receive: Receive | None = None  # reports that the client has left; None: no client can leave
    in_batch: bool = False  # whether no client waits: other requests come first

    @classmethod
    def of(cls, scope: Scope, receive: Receive | None = None) -> "Caller":
        return cls(scope.get(_KEY), receive, scope.get(_BATCH, False))

    @property
    def name(self) -> str:
        """Name of the key, which owns what is kept for the request; empty without a key."""
        return "" if self.key is None else self.key.name

    @property
    def threads(self) -> ThreadPoolExecutor:
        """For work on the request beside the event loop."""
        return BATCHES if self.in_batch else REQUESTS

    @property
    def decoding(self) -> ThreadPoolExecutor:
        """The same for decoding its body."""
        return BATCHES if self.in_batch else BODIES


NO_CALLER = Caller()


def batch_scope(path: str, key: KeyUse | None) -> Scope:
    """The ASGI scope of a line of a batch, which an endpoint reads as it reads a client's request.

    The batch itself counts the memory of its lines.
    """
    facts = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    return {**facts, _KEY: key, _BATCH: True}


class KeyCheck:
    """Middleware of an endpoint that asks for a key. A POST counts as a request of its key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        use = self.keys.find(scope)
        if use is None:
            shown = header(scope, b"authorization") or header(scope, b"x-api-key")
            what = "wrong: this server does not know it" if shown else "missing: send it as 'Authorization: Bearer KEY'"
            headers = {"WWW-Authenticate": "Bearer"}
            kind, code = "authentication_error", "invalid_api_key"
            raise APIError(f"The API key is {what}.", status=401, type=kind, code=code, headers=headers)
        record = current.get()
        if record is not None:
            record.key = use
        scope[_KEY] = use
        if scope.get("method") == "POST":
            use.take_request()
        await self.app(scope, receive, send)
