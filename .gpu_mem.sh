#!/bin/bash
# what a start takes, and what the cache then has
mkdir -p /tmp/w; pip install -q --no-index --find-links .whl msgspec pyzmq 2>&1 | tail -1
export PYTHONPATH=.
T="python -m pytest -p xdist -p pytest_timeout -p _hypothesis_pytestplugin -q"
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
timeout 60 $T tests/executor/test_reserved.py -m gpu 2>&1 | tail -15
(OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= timeout 300 $T tests/engine tests/executor tests/model tests/perf -n 12 2>&1 | tail -40) > $OUT/cpu.txt &
