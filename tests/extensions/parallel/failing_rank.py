"""In place of oscine.extensions.parallel.start.rank: fails while it starts or in its third step, as FAILS says."""

import os
import sys
from typing import NoReturn
from unittest.mock import patch

from oscine.executor.runner import TorchExecutor
from oscine.extensions.parallel.start import rank
from oscine.types import StepPlan

launch = TorchExecutor.launch


def fail(*_: object) -> NoReturn:
    raise ValueError("no room for the weights") if os.environ["FAILS"] == "start" else RuntimeError("the step fails")


def launch_some(executor: TorchExecutor, plan: StepPlan) -> None:
    fail() if plan.step == 3 else launch(executor, plan)


if __name__ == "__main__":
    at_start = os.environ["FAILS"] == "start"
    failing = (
        patch.object(rank, "load_executor", fail) if at_start else patch.object(TorchExecutor, "launch", launch_some)
    )
    with failing:
        sys.exit(rank.main())
