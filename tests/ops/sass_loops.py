"""The innermost loops of a kernel's machine code."""

import re
from collections.abc import Iterable

INSTRUCTION = r"/\*([0-9a-f]{4,})\*/ +(@!?\w+ +)?([A-Z][^;]*?) *;"
TARGET = r"^BRA\S* (?:!?\w+, )?`?\(?(?:0x)?([0-9a-f]+)"


def innermost_loops(sass: str, instruction: str) -> list[list[str]]:
    """The instructions of each loop that has the given one, and no such loop inside.

    A loop is a jump to an instruction that every path to the jump passes, and all that is passed in between.
    """
    code = {int(at, 16): (bool(condition), text) for at, condition, text in re.findall(INSTRUCTION, sass)}
    following = dict(zip(code, list(code)[1:], strict=False))
    targets = {at: int(found[1], 16) for at, (_, text) in code.items() if (found := re.match(TARGET, text))}
    after: dict[int, set[int]] = {}
    for at, (is_conditional, text) in code.items():
        ends = not is_conditional and (text.startswith("EXIT") or (at in targets and "," not in text))
        after[at] = {targets[at]} if at in targets else set()
        after[at] |= set() if ends or at not in following else {following[at]}
    before: dict[int, set[int]] = {at: set() for at in code}
    for at, nexts in after.items():
        for other in nexts & before.keys():
            before[other].add(at)
    entry = min(code)
    loops = [
        _reached(before, [jump], {header})
        for jump, header in targets.items()
        if header <= jump and jump not in _reached(after, [entry], {header})
    ]
    wanted = [loop for loop in loops if any(instruction in code[at][1] for at in loop)]
    inner = [loop for loop in wanted if not any(other < loop for other in wanted)]
    return [[code[at][1] for at in sorted(loop)] for loop in inner]


def _reached(edges: dict[int, set[int]], start: Iterable[int], stops: set[int]) -> set[int]:
    """From `start`, going no further than `stops`; with both."""
    found, to_do = set(stops), list(start)
    while to_do:
        at = to_do.pop()
        if at not in found:
            found.add(at)
            to_do += edges.get(at, ())
    return found
