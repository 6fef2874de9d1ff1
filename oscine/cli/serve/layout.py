"""The layout of several GPUs: those of --gpus, or all visible ones if no option chooses.

Of the layouts that fit the memory, the one with the best estimate (oscine.timing.layout). If the driver does not
describe the GPUs, or no step times of the model are known, the profile alone decides.
"""

from typing import TYPE_CHECKING

from oscine.cli.serve.name import Values, note
from oscine.config import NANO, Config
from oscine.devices import engines_of
from oscine.environment import Environment
from oscine.option import OptionError
from oscine.system.gpus import Machine, describe_gpus
from oscine.timing.layout import MARGIN, Candidate, Estimate, Layout, Load, best_first
from oscine.timing.machine import Link, StepTimes
from oscine.timing.table import shipped_tables

if TYPE_CHECKING:
    from oscine.model.config import ModelConfig

_SIZES = (8, 4, 2, 1)  # numbers of ranks that divide the published models
_SHARED = (8, 4, 2)  # numbers of engines that share experts
_THROUGHPUT = "max_throughput"
_SHARING = ("enable-expert-parallel", "enable-attention-dp")  # the experts, among engines
# With one of these the user has chosen, or a model is so small, or a feature so made, that one GPU is right.
_CHOSEN = (
    *("device", "tensor-parallel-size", "data-parallel-size", *_SHARING),
    *("random-weights", "load-format", "kv-events-config", "experts-on-host"),
)
_LATENCY_LOAD = Load(1024, 1024, requests=1)
_THROUGHPUT_LOAD = Load(1024, 1024)  # as many as the caches hold
_THROUGH_HOST = Link("the memory of the host", 20e-6, 8e9)  # of GPUs without peer access; not measured


def lay_out(values: Values, num_gpus: int | None) -> Values:
    """The sizes that follow, with a note that says why. None where a command knows no layouts. Raises OptionError."""
    count = _asked_for(values, num_gpus) if "gpus" in values else _found(values, num_gpus or 0)
    if count < 2:
        return {}
    if any(values.get(name) for name in _SHARING):
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
    return (estimates[0].layout, _told(estimates, values, machine)) if estimates else _usual(values, count)


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
    """The layouts that fit the memory of the GPUs."""
    from oscine.executor.kv.fit import held_sequences, plan_on_gpus
    from oscine.executor.kv.memory import DeviceMemory

    gpu, found = machine.smallest, []
    memory, hopper = DeviceMemory(gpu.total, gpu.free), gpu.capability == (9, 0)
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
    return _THROUGHPUT_LOAD if values.get("profile") == _THROUGHPUT else _LATENCY_LOAD


def _told(estimates: list[Estimate], values: Values, machine: Machine) -> str:
    """The reason, and the second choice if there is one."""
    if _load(values).requests is None:
        speeds, unit = [one.output_tok_s for one in estimates], "output tokens/s with full caches"
    else:
        speeds, unit = [one.tok_s_user for one in estimates], "tokens/s for one request"
    second = "" if len(estimates) == 1 else f"{estimates[1].layout}, {_rounded(speeds[1])}"
    if second:
        is_faster = speeds[1] > speeds[0]
        second = f"; within {MARGIN:.0%} of {second}, and more independent" if is_faster else f"; next {second}"
    link = machine.link or _THROUGH_HOST
    hint = "" if _load(values).requests is None else f"; --profile {_THROUGHPUT} is for many requests"
    return (
        f"an estimated {_rounded(speeds[0])} {unit}{second} ({estimates[0].origin}, messages through {link.name}){hint}"
    )


def _rounded(speed: float) -> str:
    """To three digits."""
    return f"{float(f'{speed:.3g}'):,.0f}"


def _sizes(layout: Layout) -> Values:
    sharing: Values = {"enable-expert-parallel": True} if layout.shares_experts else {}
    return {"tensor-parallel-size": layout.ranks, "data-parallel-size": layout.engines} | sharing


def _asked_for(values: Values, num_gpus: int | None) -> int:
    if num_gpus is None:
        raise OptionError("gpus", "is for oscine serve")
    given = values["gpus"]
    count = num_gpus if given == "all" else int(given)
    if not 0 < count <= num_gpus:
        raise OptionError("gpus", f"must be at most the number of GPUs ({num_gpus}), not {given}")
    return count


def _found(values: Values, num_gpus: int) -> int:
    """All GPUs, or 1."""
    is_published = values.get("model", NANO) != NANO and values.get("executor") != "fake"
    return num_gpus if is_published and not any(values.get(name) for name in _CHOSEN) else 1
