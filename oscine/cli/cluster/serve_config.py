"""The old name of oscine.extensions.cluster.cli.serve_config, for `import_path` in config files of Ray Serve."""

from oscine.extensions.cluster.cli.serve_config import front, model

__all__ = ["front", "model"]
