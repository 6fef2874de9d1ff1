"""The string formats of JSON schemas: those that llguidance checks, and patterns for what it checks only in part.

llguidance checks the digits of a date, but neither leap years nor leap seconds. It checks each label of a hostname,
but not the whole. The missing rules are added to the schema as a pattern, which applies together with the format.
"""

from collections.abc import Mapping
from typing import Any

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:[0-9]{{2}}-(?:[013][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-29)|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"  # leap seconds exist, but no rule says in which minutes
_LABEL = "(?:[^.]{1,2}|[^.]{2}(?:-|-?[^.-][^.]*))"  # none like xn--, which would need valid Punycode

FORMATS = frozenset(  # those that llguidance checks
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
MISSING: Mapping[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}"},
    "hostname": {"pattern": rf"^(?:{_LABEL}\.)*{_LABEL}$", "maxLength": 253},
}
WITHOUT_LOOK_AROUND: Mapping[str, str] = {  # patterns that zod 4 writes, with the same in other words
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
}
