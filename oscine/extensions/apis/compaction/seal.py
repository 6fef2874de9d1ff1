"""The opaque form of a compacted conversation: a client sends it back unchanged, and the server knows its own."""

import base64
import binascii
import hashlib
import hmac

import msgspec
from msgspec import Struct

_MARK = "oscine-compaction-1:"
_MAC_BYTES = 16


class Compacted(Struct):
    """What stands for a conversation."""

    summary: str
    said: list[tuple[str, str]] | None = None  # roles and texts that are kept; None: the client sends them
    found: list[str] = []  # names of the tools that the conversation has found, where they are known by name


class Seal:
    """Signs with HMAC-SHA256. The text is encoded, not encrypted: the client itself sent or read it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def close(self, compacted: Compacted) -> str:
        data = msgspec.json.encode(compacted)
        return _MARK + base64.b64encode(self._mac(data) + data).decode()

    def open(self, text: str) -> Compacted | None:
        """None for a text that another server wrote, or that was changed."""
        if not text.startswith(_MARK):
            return None
        try:
            signed = base64.b64decode(text.removeprefix(_MARK), validate=True)
        except (binascii.Error, ValueError):
            return None
        mac, data = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        return msgspec.json.decode(data, type=Compacted) if hmac.compare_digest(mac, self._mac(data)) else None

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, hashlib.sha256)[:_MAC_BYTES]
