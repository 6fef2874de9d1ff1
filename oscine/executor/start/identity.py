"""What makes equal tokens have equal keys and values: files and other engines tell pages apart by it."""

import hashlib
import json

from oscine.checkpoint.folder import fingerprint
from oscine.checkpoint.hub import find_model
from oscine.checkpoint.opened import config_of
from oscine.executor.start.parts import HEAD_IDENTITY
from oscine.model.config import ModelConfig
from oscine.settings.config import EngineOptions
from oscine.system.extensions import part


def identity_of(model: str, weights: str, config: ModelConfig) -> str:
    """Of name, weights and sizes.

    Of a path only the end counts, as machines may keep a model in different places. `weights` tells revisions apart.
    """
    sizes = hashlib.blake2b(json.dumps(config.to_dict(), sort_keys=True).encode(), digest_size=8).hexdigest()
    return " ".join((model.rstrip("/").rpartition("/")[2], *filter(None, (weights, sizes))))


def model_identity(options: EngineOptions) -> str:
    """Identifies all that decides the keys and values of given tokens, including those of a draft head."""
    model = options.model
    path = None if model.random_weights else find_model(model)
    weights = "" if path is None else fingerprint(path)
    identity = identity_of(model.random_weights or model.model, weights, config_of(model))
    if options.speculation.method != "eagle3":
        return identity
    return f"{identity} {part(HEAD_IDENTITY)(options, path)}"
