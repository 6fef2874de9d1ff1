"""python -m tests.ops.gluon_interpreter MODULE FUNCTION"""

import importlib
import sys

import torch

from tests.ops.gluon_interpreter.language import install
from tests.ops.triton_interpreter import do_less

torch.set_num_threads(1)
# So unwritten memory is full of NaN, or of the largest integer. The public function imports a compiler.
torch._C._set_deterministic_algorithms(True, warn_only=False)
install()
do_less()
getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()
