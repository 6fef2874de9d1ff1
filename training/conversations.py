"""Generated conversations: the mixture of skills, and the instructions, dates and efforts around them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from oscine.chat.messages import Conversation, Message
from training import words
from training.builtin_tools import beside_builtin_tools
from training.calls import call, no_call
from training.chitchat import identity, introduction, refusal, today
from training.declined import beyond, not_on_offer, without_form
from training.episode import Effort, Episode
from training.extraction import extraction
from training.extraction_calls import beside_classes, extraction_call, forced_call
from training.json_mode import class_schema, json_mode, unfillable
from training.oddities import odd
from training.recall import recall
from training.split import Draw
from training.sums import arithmetic, follow_up

_INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "Answer briefly.",
    "Be polite and concise.",
    "Be kind.",
    "You are an assistant for a small company.",
    "You are a tutor for children.",
    "Help the user.",
    "Always answer in English.",
    "You are a friendly bot.",
    "Use the functions if you need them.",
    "Think carefully.",
    "You work for the city library.",
    "Keep your answers short.",
    "Only answer what is asked.",
)


@dataclass(frozen=True)
class Sample:
    """A conversation, and the next message of the assistant."""

    skill: str
    conversation: Conversation
    completion: Message
    context_weight: float = 0.0  # loss weight of the assistant's earlier answers
    forced: bool = False  # the loss covers only the arguments of the call


def sample(draw: Draw) -> Sample:
    """One conversation of the training mixture."""
    effort: Effort = draw.choice(("low", "low", "medium", "medium", "medium", "medium", "high"))
    date = words.date(draw) if draw.chance(0.75) else ""
    if draw.chance(0.16):
        return multi_turn(draw, effort, date)
    return single(draw, _episode(draw, effort, date), effort, date)


def single(draw: Draw, episode: Episode, effort: Effort, date: str = "", index: int | None = None) -> Sample:
    """The conversation of one episode; the completion is the message `index`, or any of the assistant's."""
    return _cut(draw, episode.skill, [episode], effort, date, index)


def multi_turn(draw: Draw, effort: Effort, date: str = "") -> Sample:
    """Two to five episodes; functions stay declared throughout."""
    episodes: list[Episode] = []
    tools: list[Episode] = []
    for _ in range(draw.integer(2, 5)):
        last = episodes[-1] if episodes else None
        if last is not None and last.number is not None and last.number >= 0 and draw.chance(0.6):
            episode = follow_up(draw, effort, last.number)
        else:
            episode = _turn(draw, effort, date, bool(tools))
        if episode.tools:
            tools.append(episode)
        episodes.append(episode)
    return _cut(draw, "multi-turn", episodes, effort, date)


def _turn(draw: Draw, effort: Effort, date: str, has_tools: bool) -> Episode:
    kinds: list[Callable[[], Episode]] = [
        lambda: arithmetic(draw, effort),
        lambda: arithmetic(draw, effort),
        lambda: refusal(draw, effort),
        lambda: identity(draw, effort),
        lambda: recall(draw, effort, draw.integer(15, 120)),
        lambda: introduction(draw, effort),
        lambda: odd(draw, effort) if draw.chance(0.4) else arithmetic(draw, effort),
    ]
    if not has_tools:
        kinds.append(lambda: call(draw, effort))
    episode = draw.choice(kinds)()
    return replace(episode, instructions="") if not episode.instructions else _turn(draw, effort, date, has_tools)


def _episode(draw: Draw, effort: Effort, date: str) -> Episode:
    name = draw.rng.choices(_NAMES, _SHARES)[0]
    if name == "date":
        episode = today(draw, effort, date) if date else identity(draw, effort)
    else:
        episode = _MADE[name](draw, effort)
    if name in _NEED_NO_TOOL:
        kind = draw.rng.random()
        if kind < 0.12:
            return no_call(draw, episode)
        if kind < 0.24 and name in _SMALL_TALK:
            return beside_classes(draw, episode)
        if kind < 0.29:
            return beside_builtin_tools(draw, episode)
    return episode


_MADE: dict[str, Callable[[Draw, Effort], Episode]] = {
    "arithmetic": arithmetic,
    "call": call,
    "extraction": extraction,
    "recall": recall,
    "identity": identity,
    "introduction": introduction,
    "refusal": refusal,
    "extraction call": extraction_call,
    "forced call": forced_call,
    "JSON mode": json_mode,
    "class schema": class_schema,
    "unfillable schema": unfillable,
    "odd prompt": odd,
    "not on offer": not_on_offer,
    "beyond": beyond,
    "no form": without_form,
}
# Of a hundred conversations of one episode.
_PERCENT = {
    "arithmetic": 24.5,
    "call": 17.0,
    "extraction": 7.0,
    "recall": 12.0,
    "identity": 3.0,
    "introduction": 2.0,
    "date": 1.0,
    "refusal": 4.5,
    "extraction call": 7.0,
    "forced call": 1.0,
    "JSON mode": 8.0,
    "class schema": 2.0,
    "unfillable schema": 1.0,
    "odd prompt": 2.0,
    "not on offer": 6.0,
    "beyond": 1.5,
    "no form": 0.5,
}
_NAMES, _SHARES = [*_PERCENT], [*_PERCENT.values()]
_SMALL_TALK = ("identity", "date", "refusal", "odd prompt")
_NEED_NO_TOOL = ("arithmetic", "recall", "identity", "introduction", "date", "refusal", "odd prompt", "beyond")


def _cut(
    draw: Draw, skill: str, episodes: list[Episode], effort: Effort, date: str, index: int | None = None
) -> Sample:
    *earlier, last = episodes
    history = [message for episode in earlier for message in episode.messages]
    if index is None:
        answers = [i for i, message in enumerate(last.messages) if message.role == "assistant"]
        asked = [i for i in answers if last.messages[i].tool_calls]
        index = draw.choice(asked) if asked and draw.chance(0.6) else answers[-1]
    instructions = last.instructions or (draw.choice(_INSTRUCTIONS) if draw.chance(0.3) else "")
    leading = [Message("developer" if draw.chance(0.3) else "system", instructions)] if instructions else []
    conversation = Conversation(
        messages=(*leading, *history, *last.messages[:index]),
        tools=next((episode.tools for episode in episodes if episode.tools), ()),
        response_schema=last.response_schema,
        namespaces=last.namespaces,
        reasoning_effort=effort,
        current_date=date,
    )
    return Sample(skill, conversation, last.messages[index], last.context_weight, last.forced)
