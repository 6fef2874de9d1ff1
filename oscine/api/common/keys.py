"""API keys, sent in `Authorization: Bearer KEY` or `X-Api-Key: KEY`. rate_limits has the limits of a key.

Keys are held as their SHA-256. What changes the models of a server asks for the right `admin`: ApiKeys.check_admin.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from oscine.api.common.asgi import ASGIApp, Receive, Scope, Send
from oscine.api.common.errors import APIError
from oscine.api.common.rate_limits import KeyLimits, KeyUse
from oscine.api.common.record import current, header
from oscine.api.common.work import BATCHES, BODIES, REQUESTS
from oscine.settings.config import ServerOptions
from oscine.settings.option import OptionError
from oscine.system.addresses import is_loopback
from oscine.system.yaml_text import YamlError, parse_yaml

_KEY = "oscine.key"  # in an ASGI scope: the KeyUse of the request
_BATCH = "oscine.batch"  # the same: whether it is a line of a batch
_DIGITS = frozenset("0123456789abcdef")
_PROXY_HEADERS = (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via")  # sent by proxies for a client elsewhere


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One key of the file."""

    name: str
    key: str | None = None
    sha256: str | None = None  # of the key, 64 hexadecimal digits
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    priority: int = 0  # of its requests; lower runs sooner
    rights: tuple[Literal["admin"], ...] = ()

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
        self._plain = _given("api-key", options.api_keys)
        self._admin = _given("admin-key", options.admin_keys, is_admin=True)
        if self._plain.keys() & self._admin.keys():
            raise OptionError("admin-key", "must not be a key of --api-key, which has no right 'admin'", "api-key")
        self._by_digest = self._plain | self._admin
        self.reload()

    def __bool__(self) -> bool:
        """Whether all requests need a key. With an empty file of keys, no request has one."""
        return bool(self._plain) or self._path is not None

    @property
    def for_admin(self) -> bool:
        """Whether a request that needs the right `admin` needs a key."""
        return bool(self) or bool(self._admin)

    def reload(self) -> None:
        """Reads the file again; keys that stay keep their usage. If it raises ValueError, nothing has changed."""
        if self._path is None:
            return
        entries = _read(self._path)
        given = self._plain | self._admin
        if shared := {entry.name for entry in entries} & {use.name for use in given.values()}:
            option = (name := min(shared)).rpartition("-")[0]
            raise _refused(f"{self._path}: {name!r} is what a key of --{option} is called")
        for entry in entries:
            if not entry.rights and entry.digest() in self._admin:
                raise _refused(f"{self._path}: {entry.name!r} has a key of --admin-key, but no right 'admin'")
        known = {use.name: use for use in self._by_digest.values()}
        by_digest = {}
        for entry in entries:
            limits = KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_parallel)
            use = known.get(entry.name) or KeyUse(entry.name, limits, entry.priority)
            use.change(limits, entry.priority)
            use.is_admin = "admin" in entry.rights
            by_digest[entry.digest()] = use
        self._by_digest = by_digest | given

    def named(self, name: str) -> KeyUse | None:
        return next((use for use in self._by_digest.values() if use.name == name), None)

    def find(self, scope: Scope) -> KeyUse | None:
        scheme, _, key = header(scope, b"authorization").partition(b" ")
        shown = key.strip() if scheme.lower() == b"bearer" else header(scope, b"x-api-key")
        return self._by_digest.get(hashlib.sha256(shown).digest())

    def check(self, scope: Scope) -> KeyUse:
        """The key of a request. Raises APIError 401."""
        use = self.find(scope)
        if use is not None:
            return use
        shown = header(scope, b"authorization") or header(scope, b"x-api-key")
        what = "wrong: this server does not know it" if shown else "missing: send it as 'Authorization: Bearer KEY'"
        headers = {"WWW-Authenticate": "Bearer"}
        kind, code = "authentication_error", "invalid_api_key"
        raise APIError(f"The API key is {what}.", status=401, type=kind, code=code, headers=headers)

    def check_admin(self, scope: Scope) -> None:
        """For what loads, unloads, fetches, deletes or replaces models, or puts them to sleep.

        The request needs a key with the right `admin`. Where the server has no keys at all, it must come from this
        machine, and through no proxy. Raises APIError 401 or 403.
        """
        if not self.for_admin:
            if not _is_local(scope):
                message = (
                    "Without keys only clients on the server's own machine may change its models: "
                    "start the server with --admin-key."
                )
                raise _forbidden(message)
        elif not (use := self.check(scope)).is_admin:
            message = (
                f"The API key {use.name!r} may not change the models of this server: "
                "that needs a key of --admin-key, or 'rights: [admin]' in the file of keys."
            )
            raise _forbidden(message)

    def is_admin(self, scope: Scope) -> bool:
        """Whether check_admin would let the request pass."""
        try:
            self.check_admin(scope)
        except APIError:
            return False
        return True


def _given(option: str, keys: tuple[str, ...], *, is_admin: bool = False) -> dict[bytes, KeyUse]:
    """Keys of the command line, which have no limits, by their digest."""
    numbers = {hashlib.sha256(key.encode()).digest(): i for i, key in enumerate(keys, 1)}
    return {digest: KeyUse(f"{option}-{i}", KeyLimits(), is_admin=is_admin) for digest, i in numbers.items()}


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine, as far as can be known."""
    client = scope.get("client")
    return client is not None and is_loopback(client[0]) and not any(header(scope, name) for name in _PROXY_HEADERS)


def _forbidden(message: str) -> APIError:
    return APIError(message, status=403, type="permission_error", code="admin_required")


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
        use = self.keys.check(scope)
        record = current.get()
        if record is not None:
            record.key = use
        scope[_KEY] = use
        if scope.get("method") == "POST":
            use.take_request()
        await self.app(scope, receive, send)


class AdminCheck:
    """Middleware of an endpoint that needs the right `admin`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.keys.check_admin(scope)
        await self.app(scope, receive, send)
