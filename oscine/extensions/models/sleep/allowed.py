"""What cannot be combined with --enable-sleep-mode. Imports no torch."""

from oscine.settings.config import EngineOptions
from oscine.settings.option import OptionError

NAME = "enable-sleep-mode"


def check_sleep(options: EngineOptions, num_engines: int = 1) -> None:
    """`num_engines`: with which the model is served. Raises OptionError."""
    if not options.sleep_mode:
        return
    if (ranks := options.model.tensor_parallel_size) > 1:  # each rank would have to sleep at the same step
        raise OptionError(NAME, f"needs --tensor-parallel-size 1, not {ranks}", "tensor-parallel-size")
    if num_engines > 1:
        raise OptionError(NAME, f"needs --data-parallel-size 1, not {num_engines}", "data-parallel-size")
    if options.model.experts_on_host is not None:  # which are pinned, and read from there
        raise OptionError(NAME, "and --experts-on-host exclude each other", "experts-on-host")
    if options.peers.host is not None or options.peers.kv_transfer:  # others may read the pages at any time
        raise OptionError(NAME, "is for an engine that no other process reaches, so not for a cluster")
