"""The models of a service by their names, also in Ollama's spelling, which has a tag: gpt-oss:20b."""

import re
from collections.abc import Iterable

from oscine.api.common.errors import unavailable
from oscine.api.serving.served_model import ANY_NAME, ServedModel

_PUBLISHED = re.compile(r"(?:[^/:]+/)?(gpt-oss(?:-safeguard)?)-(\d+b)(.*)", re.IGNORECASE)  # openai/gpt-oss-20b
_LATEST = "latest"


def ollama_name(name: str) -> str:
    """The name in Ollama's spelling. A missing tag becomes the size of a published model, or else `latest`."""
    published = _PUBLISHED.fullmatch(name)
    if published:
        return "{}:{}{}".format(*published.groups())
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_LATEST}"


def meant_by(name: str, served: Iterable[str]) -> str | None:
    """The served name that equals `name` in Ollama's spelling; None if there is none.

    If no model of the family has the tag `latest`, it stands for the first served one.
    """
    spelled = {ollama_name(other).lower(): other for other in reversed([*served])}
    wanted = ollama_name(name).lower()
    if wanted in spelled:
        return spelled[wanted]
    family, _, tag = wanted.rpartition(":")
    relatives = [other for spelling, other in spelled.items() if spelling.rpartition(":")[0] == family]
    return relatives[-1] if relatives and tag == _LATEST else None


class ServedModels:
    """Models by their names. Those that leave have no names, and still have requests."""

    def __init__(self) -> None:
        self._by_name: dict[str, ServedModel] = {}
        self.leaving: set[ServedModel] = set()

    def add(self, model: ServedModel) -> None:
        """Raises ValueError for a name that another model has."""
        names = (*model.names, ANY_NAME) if model.has_any_name else model.names
        for name in names:
            if name in self._by_name:
                raise ValueError(f"there is a model {name!r} already")
        self._by_name |= dict.fromkeys(names, model)

    def let_go(self, model: ServedModel) -> None:
        """Its names are free, and it leaves."""
        self._by_name = {name: other for name, other in self._by_name.items() if other is not model}
        self.leaving.add(model)

    def replace(self, old: ServedModel, new: ServedModel) -> None:
        """Raises ValueError as `add` does, and nothing has changed."""
        before = self._by_name
        self.let_go(old)
        try:
            self.add(new)
        except ValueError:
            self._by_name = before
            self.leaving.discard(old)
            raise

    @property
    def models(self) -> list[ServedModel]:
        """In the order in which they came, without those that leave."""
        return list(dict.fromkeys(self._by_name.values()))

    @property
    def all(self) -> list[ServedModel]:
        return [*self.models, *self.leaving]

    @property
    def names(self) -> list[str]:
        return [name for name in self._by_name if name != ANY_NAME]

    @property
    def running(self) -> int:
        """The number of sequences that are admitted and not over."""
        return sum(model.admission.sequences for model in self.all)

    def cancel_all(self) -> None:
        for model in self.all:
            model.cancel_all()

    def find(self, name: str | None) -> ServedModel | None:
        """Without a name: the only model. Raises APIError 503 where there is no model yet."""
        known = self._by_name
        if name is not None:
            return known.get(name) or known.get(ANY_NAME) or known.get(meant_by(name, known) or "")
        models = self.models
        if not models:
            raise unavailable("The server has no model yet.", code="starting")
        return models[0] if len(models) == 1 else None
