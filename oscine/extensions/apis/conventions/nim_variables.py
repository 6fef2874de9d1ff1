"""NIM's environment variables, as options of `oscine serve`: they set up a container without a command line.

The command line wins over NIM_PASSTHROUGH_ARGS, that over the other variables, those over the file of --config, and
NIM_MODEL_PROFILE has the least weight, as in NIM.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from oscine.cli.parser import Parser
from oscine.cli.serve.options import NAMES, add_options
from oscine.extensions.apis.conventions.profiles import find_profile
from oscine.settings.config import NANO
from oscine.settings.name import NOTES, Values
from oscine.settings.option import FileKeyError, OptionError

Variables = Mapping[str, str]

PASSTHROUGH, PROFILE = "NIM_PASSTHROUGH_ARGS", "NIM_MODEL_PROFILE"
_LOG_LEVELS = {"default": "info", "trace": "debug", "critical": "error"}  # NIM's -> ours
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_HUB = "hf://"


def _model(text: str) -> str:
    """hf://owner/name, or a folder."""
    scheme, found, _ = text.partition("://")
    if found and scheme != "hf":
        raise ValueError(f"must be hf://owner/name or a folder: {scheme}:// is not supported")
    return text.removeprefix(_HUB)


def _flag(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"must be true or false, not {text!r}")
    return text.lower() in _TRUE


def _log_level(text: str) -> str:
    return _LOG_LEVELS.get(text.lower(), text.lower())


def _one(text: str) -> None:
    if text != "1":
        raise ValueError(f"must be 1, not {text}: pipeline parallelism and several nodes are not available")


def _tls(text: str) -> None:
    if text.lower() not in ("", "disabled", "tls"):
        raise ValueError(f"must be disabled or tls, not {text!r}")


# Variable -> option and reader of its value; without an option it is only checked.
OPTIONS_OF: dict[str, tuple[str | None, Callable[[str], Any]]] = {
    "NIM_MODEL_PATH": ("model", _model),
    "NIM_MODEL_NAME": ("model", _model),
    "NIM_SERVED_MODEL_NAME": ("served-model-name", lambda text: text.split(",")),
    "NIM_SERVER_PORT": ("port", str),
    "NIM_CACHE_PATH": ("download-dir", str),
    "NIM_MAX_MODEL_LEN": ("max-model-len", str),
    "NIM_MAX_NUM_SEQS": ("max-num-seqs", str),
    "NIM_TENSOR_PARALLEL_SIZE": ("tensor-parallel-size", str),
    "NIM_GPU_MEM_FRACTION": ("gpu-memory-utilization", str),
    "NIM_KVCACHE_PERCENT": ("gpu-memory-utilization", str),
    "NIM_DISABLE_CUDA_GRAPH": ("enforce-eager", _flag),
    "NIM_LOG_LEVEL": ("log-level", _log_level),
    "NIM_JSONL_LOGGING": ("log-format", lambda text: "json" if _flag(text) else "text"),
    "NIM_CORS_ALLOW_ORIGINS": ("cors-origins", lambda text: [part.strip() for part in text.split(",")]),
    "NIM_SSL_CERTS_PATH": ("ssl-certfile", str),
    "NIM_SSL_KEY_PATH": ("ssl-keyfile", str),
    "NIM_SSL_MODE": (None, _tls),
    "NIM_PIPELINE_PARALLEL_SIZE": (None, _one),
    "NIM_NUM_COMPUTE_NODES": (None, _one),
}


def read_variables(variables: Variables, read: Callable[[str, Any], Values]) -> tuple[Values, list[str]]:
    """The options that the variables set, and notes about them. `read(option, value)` is as for a file.

    Raises OptionError that names the variable.
    """
    values: Values = {}
    notes = []
    for name, (option, convert) in OPTIONS_OF.items():
        text = variables.get(name, "")
        if not text:
            continue
        try:
            if not text.isprintable():
                raise ValueError("has a line break or another control character inside")
            value = convert(text)
            values |= {} if option is None else read(option, value)
        except OptionError as error:
            raise FileKeyError(name, error.rule) from None
        except ValueError as error:
            raise FileKeyError(name, str(error)) from None
        notes.append(f"{name} sets --{option}" if option else f"{name} has been checked")
    known = {*OPTIONS_OF, PASSTHROUGH, PROFILE}
    notes += [f"{name} has no effect" for name in sorted(variables) if name not in known]
    return values, notes


def layers_of(variables: Variables) -> list[Values]:
    """Options of NIM_PASSTHROUGH_ARGS, then those of the other variables but NIM_MODEL_PROFILE. Raises OptionError."""
    parser = Parser(prog=PASSTHROUGH, add_help=False)
    add_options(parser)
    passed = vars(parser.parse_args(shlex.split(variables.get(PASSTHROUGH, ""))))
    values, notes = read_variables(variables, lambda option, value: NAMES[option].read(value))
    return [passed, values | {NOTES: tuple(notes)}]


def read_profile_variable(variables: Variables, model: str | None) -> Values:
    """What NIM_MODEL_PROFILE sets; `model` is the one that was given. Raises OptionError."""
    wanted = variables.get(PROFILE, "")
    if not wanted or wanted == "default":
        return {}
    try:
        name = f"{model.removeprefix('openai/')} {wanted}" if model and wanted.startswith("oscine-") else wanted
        return find_profile(name).options
    except ValueError as error:
        raise FileKeyError(PROFILE, str(error)) from None


def selected_model(variables: Variables) -> str:
    """The model that the variables name; the embedded one if none do. Raises ValueError."""
    values, _ = read_variables(variables, lambda option, value: {option: value})
    found: str = values.get("model") or read_profile_variable(variables, None).get("model", NANO)
    return found


def download_dir(variables: Variables) -> str | None:
    return variables.get("NIM_CACHE_PATH") or None
