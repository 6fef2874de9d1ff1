"""Generated conversations: the mixture of skills, and the instructions, dates and efforts around them.

Knows how often each skill occurs. Must not know tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from oscine.chat.messages import Conversation, Message
from training import words
from training.calls import call, no_call
from training.chitchat import identity, introduction, refusal, today
from training.episode import Effort, Episode
from training.extraction import extraction
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
    """A conversation, and what the assistant must say next."""

    skill: str
    conversation: Conversation
    completion: Message
    context_weight: float = 0.0  # loss weight of the assistant's earlier answers


def sample(draw: Draw) -> Sample:
    """One conversation of the training mixture."""
    effort: Effort = draw.choice(("low", "medium", "medium", "medium", "high"))
    date = words.date(draw) if draw.chance(0.75) else ""
    if draw.chance(0.16):
        return multi_turn(draw, effort, date)
    return single(draw, _episode(draw, effort, date), effort, date)


def single(draw: Draw, episode: Episode, effort: Effort, date: str = "", index: int | None = None) -> Sample:
    """The conversation of one episode; the completion is the message `index`, or any of the assistant's."""
    return _cut(draw, episode.skill, [episode], effort, date, index)


def multi_turn(draw: Draw, effort: Effort, date: str = "") -> Sample:
    """Two to five episodes; functions stay on offer throughout."""
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
    ]
    if not has_tools:
        kinds.append(lambda: call(draw, effort))
    episode = draw.choice(kinds)()
    return replace(episode, instructions="") if not episode.instructions else _turn(draw, effort, date, has_tools)


def _episode(draw: Draw, effort: Effort, date: str) -> Episode:
    kind = draw.rng.random()
    if kind < 0.33:
        episode = arithmetic(draw, effort)
    elif kind < 0.62:
        return call(draw, effort)
    elif kind < 0.74:
        return extraction(draw, effort)
    elif kind < 0.85:
        return recall(draw, effort)
    elif kind < 0.89:
        episode = identity(draw, effort)
    elif kind < 0.91:
        episode = introduction(draw, effort)
    elif kind < 0.92 and date:
        episode = today(draw, effort, date)
    else:
        episode = refusal(draw, effort)
    return no_call(draw, episode) if draw.chance(0.12) else episode


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
        reasoning_effort=effort,
        current_date=date,
    )
    return Sample(skill, conversation, last.messages[index], last.context_weight)
