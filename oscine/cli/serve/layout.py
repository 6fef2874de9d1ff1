"""How a server uses several GPUs: those of --gpus, or all visible ones where no option says what to use."""

from oscine.cli.serve.name import Values, note
from oscine.config import NANO
from oscine.option import OptionError

_SIZES = (8, 4, 2, 1)  # numbers of ranks that divide the published models
_THROUGHPUT = "max_throughput"
_SHARING = ("enable-expert-parallel", "enable-attention-dp")  # the experts, among engines
# With one of these the user has chosen, or a model is so small, or a feature so made, that one GPU is right.
_CHOSEN = (
    *("device", "tensor-parallel-size", "data-parallel-size", *_SHARING),
    *("random-weights", "load-format", "kv-events-config", "experts-on-host"),
)


def lay_out(values: Values, num_gpus: int | None) -> Values:
    """The sizes that follow, with a note that says why. None where a command knows no layouts. Raises OptionError."""
    count = _asked_for(values, num_gpus) if "gpus" in values else _found(values, num_gpus or 0)
    if count < 2:
        return {}
    if any(values.get(name) for name in _SHARING):
        ranks, why = 1, ", which share their experts"
    elif values.get("kv-offload-bytes"):
        ranks, why = 1, ": --kv-offload-bytes needs engines of one GPU"
    elif values.get("profile") == _THROUGHPUT:
        ranks, why = 1, f": --profile {_THROUGHPUT} is for the most tokens per second"
    else:
        ranks = next(size for size in _SIZES if count % size == 0)
        why = f", for the shortest time per token; --profile {_THROUGHPUT} makes an engine of each"
    layout = f"{count} GPUs are used as {_named(count // ranks, ranks)}{why}. See --gpus"
    return {"tensor-parallel-size": ranks, "data-parallel-size": count // ranks} | note(layout)


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


def _named(engines: int, ranks: int) -> str:
    of_each = f"{ranks} GPUs" if ranks > 1 else "one GPU"
    return f"1 engine of {of_each}" if engines == 1 else f"{engines} engines of {of_each} each"
