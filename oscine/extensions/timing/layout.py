"""The layout of several GPUs.

Of the layouts that fit the memory, the one with the best estimate (estimates.py). If the driver does not describe the
GPUs, or no step times of the model are known, the profile alone decides.
"""

from typing import TYPE_CHECKING

from oscine.cli.serve.options import SHARING
from oscine.extensions.timing.estimates import MARGIN, Candidate, Estimate, Layout, Load, best_first
from oscine.extensions.timing.gpus import Machine, describe_gpus
from oscine.extensions.timing.machine import Link, StepTimes
from oscine.extensions.timing.table import shipped_tables
from oscine.settings.config import Config
from oscine.settings.devices import engines_of
from oscine.settings.name import Values, note
from oscine.settings.validators import load_of
from oscine.system.environment import Environment

if TYPE_CHECKING:
    from oscine.model.config import ModelConfig

_SIZES = (8, 4, 2, 1)  # numbers of ranks that divide the published models
_SHARED = (8, 4, 2)  # numbers of engines that share experts
_THROUGHPUT = "max_throughput"
_LATENCY_LOAD = Load(1024, 1024, requests=1)
_THROUGHPUT_LOAD = Load(1024, 1024)  # as many as the caches hold
_THROUGH_HOST = Link("the memory of the host", 20e-6, 8e9)  # of GPUs without peer access; not measured


def lay_out(values: Values, count: int) -> Values:
    """The sizes of the layout of so many GPUs, and a note. Raises OptionError."""
    if any(values.get(name) for name in SHARING):
        layout, why = Layout(count, shares_experts=True), "as an option says"
    else:
        environment = Environment()
        machine = describe_gpus(count, environment.visible_gpus, peer_access=not environment.no_peer_access)
        layout, why = choose(values, count, machine)
    return _sizes(layout) | note(f"{count} GPUs are used as {layout}: {why}. See --gpus")


def choose(values: Values, count: int, machine: Machine | None) -> tuple[Layout, str]:
    """The layout, and the reason. `machine`: None if the driver does not describe the GPUs. Raises OptionError."""
    alone, config = Layout(count), Config.of(values)
    for name in ("kv-offload-bytes", "experts-on-host"):
        if values.get(name):
            return alone, f"--{name} needs engines of one GPU"
    if config.engine.speculation.method == "eagle3":
        return alone, "an EAGLE-3 head needs engines of one GPU"
    if machine is None:
        return _usual(values, count)
    shapes = _shapes(config)
    candidates = [] if shapes is None else _candidates(values, count, machine, shapes)
    if machine.link is None and any(one.layout == alone for one in candidates):
        return alone, "no peer access: a GPU cannot reach the memory of another"
    estimates = [] if shapes is None else _estimates(values, candidates, machine, shapes)
    return (estimates[0].layout, _reason(estimates, values, machine)) if estimates else _usual(values, count)


def _usual(values: Values, count: int) -> tuple[Layout, str]:
    """The layout that follows from the profile alone."""
    if values.get("profile") == _THROUGHPUT:
        return Layout(count), f"--profile {_THROUGHPUT} is for the most tokens per second"
    ranks = next(size for size in _SIZES if count % size == 0)
    return Layout(count // ranks, ranks), f"the shortest time per token; --profile {_THROUGHPUT} is for many requests"


def _shapes(config: Config) -> "ModelConfig | None":
    from oscine.checkpoint.hub import shapes_of

    try:
        return shapes_of(config.engine.model)
    except ValueError:  # the engine says what is wrong
        return None


def _candidates(values: Values, count: int, machine: Machine, shapes: "ModelConfig") -> list[Candidate]:
    """The layouts that fit every GPU."""
    from oscine.executor.kv.fit import held_sequences, plan_on_gpus
    from oscine.executor.kv.memory import DeviceMemory

    gpus, found = machine.gpus, []
    memory = DeviceMemory(min(gpu.total for gpu in gpus), min(gpu.free for gpu in gpus))
    hopper = all(gpu.capability == (9, 0) for gpu in gpus)
    for layout in _layouts(values, count, machine):
        sharing = layout.engines if layout.shares_experts else 1
        try:
            options = engines_of(Config.of(values | _sizes(layout)), count)[0]
            plan = plan_on_gpus(shapes, options, memory, layout.ranks, hopper=hopper, num_sharing=sharing)
        except ValueError:
            continue
        if sequences := held_sequences(plan, options, _load(values).tokens):
            found.append(Candidate(layout, sequences, plan.max_num_batched_tokens))
    return found


def _layouts(values: Values, count: int, machine: Machine) -> list[Layout]:
    found = [Layout(count // ranks, ranks) for ranks in _SIZES if count % ranks == 0]
    if machine.link is not None and count in _SHARED and values.get("dtype") != "float32":
        found.append(Layout(count, shares_experts=True))
    return found


def _estimates(values: Values, candidates: list[Candidate], machine: Machine, shapes: "ModelConfig") -> list[Estimate]:
    """Best first; empty if no step times of such a model were measured."""
    tables = shipped_tables()
    near = [one.header for one in tables if one.header.hidden == shapes.hidden_size]
    if not near:
        return []
    model = min(near, key=lambda header: abs(header.layers - shapes.num_hidden_layers)).model
    times = StepTimes.of(tables, model, machine.chip, machine.link or _THROUGH_HOST)
    return best_first(times, candidates, _load(values))


def _load(values: Values) -> Load:
    if (given := load_of(values.get("expected-load") or "")) is not None:
        requests, prompt, answer = given
        return Load(prompt, answer, requests)
    return _THROUGHPUT_LOAD if values.get("profile") == _THROUGHPUT else _LATENCY_LOAD


def _reason(estimates: list[Estimate], values: Values, machine: Machine) -> str:
    """The reason, and the second choice if there is one."""
    load, speeds = _load(values), [one.output_tok_s for one in estimates]
    if load.requests is None:
        unit = "output tokens/s with full caches"
    elif load.requests == 1:
        unit = "tokens/s for one request"
    else:
        unit = f"output tokens/s for {load.requests:,} requests"
    second = "" if len(estimates) == 1 else f"{estimates[1].layout}, {_rounded(speeds[1])}"
    if second:
        is_faster = speeds[1] > speeds[0]
        second = f"; within {MARGIN:.0%} of {second}, and more independent" if is_faster else f"; next {second}"
    link = machine.link or _THROUGH_HOST
    hint = f"; --profile {_THROUGHPUT} is for many requests" if load is _LATENCY_LOAD else ""
    return (
        f"an estimated {_rounded(speeds[0])} {unit}{second} ({estimates[0].origin}, messages through {link.name}){hint}"
    )


def _rounded(speed: float) -> str:
    """To three digits."""
    return f"{float(f'{speed:.3g}'):,.0f}"


def _sizes(layout: Layout) -> Values:
    sharing: Values = {"enable-expert-parallel": True} if layout.shares_experts else {}
    return {"tensor-parallel-size": layout.ranks, "data-parallel-size": layout.engines} | sharing
