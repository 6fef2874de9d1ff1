"""Which engines serve a model: one process, or several that an extension makes one of."""

from oscine.api.serving.service import Service
from oscine.engine.process.client import EngineClient
from oscine.settings.config import Config
from oscine.settings.option import OptionError
from oscine.system.extensions import is_there, lacking, load

SEVERAL = "oscine.extensions.replicas.data_parallel:add_engines"  # of --data-parallel-size


def place(service: Service, config: Config, num_gpus: int | None = None) -> None:
    """Adds the configuration's model to the service. `num_gpus`: of this machine, for several engines.

    Raises ValueError that names the option.
    """
    if config.server.data_parallel_size == 1:
        service.add(EngineClient(config.engine), config.engine, config.server.served_model_names)
    elif is_there(SEVERAL):
        load(SEVERAL)(service, config, num_gpus)
    else:
        raise OptionError("data-parallel-size", f"above 1 {lacking(SEVERAL)}")
