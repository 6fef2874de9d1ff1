"""What users and their files rely on, one item per line in public.txt. A move of modules leaves the file as it is.

`python -m tests.contract.test_public` writes the file anew.
"""

import argparse
import asyncio
import dataclasses
import inspect
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric

from oscine import llm
from oscine.api.apis import make_service
from oscine.api.openapi import describe
from oscine.api.routes import endpoints
from oscine.api.telemetry.energy import EnergyCollector
from oscine.api.telemetry.engine_metrics import EngineCollector
from oscine.api.telemetry.metrics import Metrics
from oscine.cli import whole_parser
from oscine.cli.serve.options import NAMES
from oscine.extensions.apis.conventions import nim_variables
from oscine.extensions.replicas.client.metrics import ClusterMetrics
from oscine.extensions.replicas.spec import deployment
from oscine.llm import events, results
from oscine.settings.config import OPTIONS, CacheOptions, Config, EngineOptions, SpeculationOptions
from oscine.settings.name import Name
from oscine.settings.option import Option, Options, options_of
from oscine.system import environment
from oscine.types import EngineStats
from tests.contract.test_names import resolves

FILE = Path(__file__).with_name("public.txt")

# Written in files of users, which are Ray Serve's or Python. No declaration lists them.
IN_FILES_OF_USERS = (
    *("oscine:AsyncLLM", "oscine:LLM"),
    *("oscine.extensions.cluster.cli.serve_config:front", "oscine.extensions.cluster.cli.serve_config:model"),
    "oscine.extensions.cluster.ray.autoscaling:PoolPolicy",
    *(
        "oscine.extensions.tools.browser:Hit",
        "oscine.extensions.tools.browser_page:Document",
        "oscine.extensions.tools.browser_page:document_of",
    ),
)


def commands() -> Iterator[str]:
    """Commands, and each option or operand with the commands that take it in the same form."""
    takers: defaultdict[str, list[str]] = defaultdict(list)
    parsers = [("oscine", whole_parser())]
    for path, parser in parsers:  # grows
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += [(f"{path} {name}", below) for name, below in action.choices.items()]
                yield from (f"command {path} {choice.dest}: {choice.help}" for choice in action._choices_actions)
            else:
                takers[of_action(action)].append(path.removeprefix("oscine").strip() or "oscine")
    yield from (f"option {text} [{', '.join(sorted(paths))}]" for text, paths in takers.items())


def of_action(action: argparse.Action) -> str:
    name = " ".join(action.option_strings) or f"<{action.dest}>"
    declared = OPTIONS.get(name.removeprefix("--")) or OPTIONS.get(action.dest)
    theirs = getattr(action, "_name", None)  # of what is declared as an Option, and of names of other servers
    if theirs is None:
        kind = "flag" if action.nargs == 0 else getattr(action.type, "__name__", "str")
        names = ("nargs", "choices", "default", "required") if action.nargs != 0 else ()
        return f"{name} {kind}{facts(action, names)}: {action.help}"
    is_ours = declared is not None and declared.help_text == theirs.help
    return f"{name} {of_option(declared) if declared and is_ours else of_name(theirs)}"


def of_name(name: Name) -> str:
    return f"{'flag' if name.nargs == 0 else f'{name.metavar} {name.nargs or 1}'}: {name.help}"


def of_option(option: Option) -> str:
    names = ("default", "several", "nargs", "choices", "excludes", "at_least", "above", "at_most")
    return f"{option.type.__name__}{facts(option, names)}: {option.help_text}"


def facts(described: object, names: Sequence[str]) -> str:
    given = {name: getattr(described, name) for name in names}
    unsaid = {name for name, value in given.items() if value in (None, (), "", argparse.SUPPRESS) or value is False}
    return "".join(f" {name}={value}" for name, value in given.items() if name not in unsaid)


def keys() -> Iterator[str]:
    """Of YAML files. Those without a dot are described as options of the command line."""
    for name, meaning in NAMES.items():
        yield f"key config {name}" + (f" {of_name(meaning)}" if "." in name else "")
    for kind in vars(deployment).values():
        if isinstance(kind, type) and issubclass(kind, Options) and kind.__module__ == deployment.__name__:
            yield from (f"key cluster {kind.group}.{option.name} {of_option(option)}" for option in options_of(kind))


def variables() -> Iterator[str]:
    """Of the environment: what is asked for when nothing is set, and when everything is."""
    asked = {*nim_variables.OPTIONS_OF, nim_variables.PASSTHROUGH, nim_variables.PROFILE}
    with pytest.MonkeyPatch.context() as patch:
        for answer in (None, "otlp"):
            variables = SimpleNamespace(get=partial(ask, asked, answer), items=list)
            patch.setattr(environment, "os", SimpleNamespace(environ=variables, path=os.path))
            inspect.getmembers(environment.Environment())  # asks for each
    yield from (f"variable {name}" for name in asked)


def ask(asked: set[str], answer: str | None, name: str, default: Any = None) -> Any:
    asked.add(name)
    return answer or default


def routes() -> Iterator[str]:
    """The server's own description, which lists all routes: tests/api/test_openapi.py."""
    document = describe(endpoints(make_service(Config())), keys=True)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from of_operation(f"route {method.upper()} {path}", operation)
    for name, schema in document["components"]["schemas"].items():
        yield f"schema {name}: {schema.get('type', 'any')}"
        yield from (f"schema {name}.{field}" for field in schema.get("properties", ()))


def of_operation(name: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"{name}: {operation['summary']}; {'key' if 'security' in operation else 'open'}"
    for parameter in operation.get("parameters", ()):
        yield f"{name} {parameter['in']} {parameter['name']}"
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"{name} body {media} {shape(content)}"
    answers = [
        f"{status} {media} {shape(content)}".replace("application/json ", "")
        for status, answer in operation["responses"].items()
        for media, content in answer["content"].items()
    ]
    refused = [answer for answer in answers if not answer.startswith("200")]
    yield from (f"{name} {answer}" for answer in answers if answer not in refused)
    yield from [f"{name} {', '.join(refused)}"] if refused else ()


def shape(content: dict[str, Any]) -> str:
    schema = content.get("schema", {})
    return str(schema.get("$ref", schema.get("type", "any"))).rpartition("/")[2]


def metrics() -> Iterator[str]:
    """Of a server whose engine drafts, offloads and fetches pages, and of a cluster's ingress."""
    nothing: Any = None  # neither is asked for
    energy = EnergyCollector(nothing)
    energy._joules = {0: 1.0}
    options = EngineOptions(cache=CacheOptions(kv_offload_bytes=1), speculation=SpeculationOptions("ngram"))
    engine = SimpleNamespace(state="ready", restarts=0, stats=EngineStats())
    model: Any = SimpleNamespace(names=("m",), engine=engine, options=options)
    served = Metrics()
    served.watch_connections(int)
    for collector in (EngineCollector(lambda: [model], transfers=True), energy, ClusterMetrics(nothing, dict)):
        served.watch(collector)

    async def collected() -> list[Metric]:  # in an event loop, whose tasks are counted
        return list(served.collect())

    for family in asyncio.run(collected()):
        labels = sorted({label for sample in family.samples for label in sample.labels})
        yield f"metric {family.name} {family.type} {' '.join(labels)}: {family.documentation}"


def python() -> Iterator[str]:
    """What can be imported, and the methods and fields of each class by its own name."""
    yield from (f"python {name}" for name in IN_FILES_OF_USERS if resolves(name))
    for module in (llm, results, events):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if name in getattr(module, "__all__", ()) or kind.__module__ == module.__name__:
                yield f"python {module.__name__}:{name}"
                yield from of_class(kind)


def of_class(kind: type) -> Iterator[str]:
    """Fields of a record; methods with their signatures, in which no module is named."""
    fields = {field.name: field.type for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    yield from (f"python {kind.__name__}.{name}: {plain(inspect.formatannotation(of))}" for name, of in fields.items())
    for name, member in vars(kind).items():
        if name not in fields and (not name.startswith("_") or (name == "__init__" and not fields)):
            called = inspect.isfunction(member)
            yield f"python {kind.__name__}.{name}{plain(str(inspect.signature(member))) if called else ''}"


def plain(annotation: str) -> str:
    return re.sub(r"\b(?:oscine\.(?:[a-z]\w*\.)+|typing\.|collections\.abc\.)", "", annotation)


def lines() -> list[str]:
    parts = (commands(), keys(), variables(), routes(), metrics(), python())
    return sorted({" ".join(line.split()) for part in parts for line in part})


def test_what_is_public_is_a_decision() -> None:
    """Where a change is meant, `make public` writes the file anew. Its diff shows what users will notice."""
    old, new = set(FILE.read_text().splitlines()), set(lines())
    changes = [*(f"- {line}" for line in sorted(old - new)), *(f"+ {line}" for line in sorted(new - old))]
    assert not changes, "\n".join(("gone (-) and new (+):", *changes))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
