"""The layout with the best estimate, for GPUs that the driver describes."""

from dataclasses import replace
from typing import Any

import pytest

from oscine.checkpoint.hub import PUBLISHED
from oscine.cli.serve.read_options import read_config, read_profile
from oscine.executor.kv.fit import plan_on_gpus
from oscine.executor.kv.memory import DeviceMemory
from oscine.extensions.timing import layout as layout_module
from oscine.extensions.timing.estimates import MARGIN, Candidate, Layout, Load, estimate
from oscine.extensions.timing.gpus import Gpu, Machine
from oscine.extensions.timing.machine import Link, StepTimes
from oscine.extensions.timing.table import Table, shipped_tables
from oscine.settings.config import Config
from oscine.settings.devices import engines_of
from tests.cli.test_options import parser

GIB = 1 << 30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 80 * GIB - GIB // 2, (9, 0), 3.352e12, 1.07e15)
NVLINK, PCIE = Link("NVLink", 1.66e-6, 3.52e11), Link("PCIe", 5e-6, 2.4e10)
PAGES = 1536 // 64 + 3  # of a sequence with half of its answer: of full attention, and of a window of 128 that moves on
PROFILES = ("low_latency", "max_throughput")
LOADS = {"low_latency": Load(1024, 1024, 1), "max_throughput": Load(1024, 1024)}


def gpu(gib: int, share: float = 1.0) -> Gpu:
    """A chip with a share of the bandwidth and the arithmetic of an H100."""
    memory = {"total": gib * GIB, "free": gib * GIB - GIB // 2}
    return replace(
        H100, name="other", bytes_per_s=share * H100.bytes_per_s, flops_per_s=share * H100.flops_per_s, **memory
    )


def choose(model: str, profile: str, machine: Machine, **others: Any) -> tuple[Layout, str]:
    values = read_profile(profile) | {"profile": profile, "model": f"gpt-oss-{model}"} | others
    return layout_module.choose(values, len(machine.gpus), machine)


def brute_force(model: str, profile: str, machine: Machine) -> Layout | None:
    """The best of all layouts, each with as many sequences as its memory holds."""
    count, speeds = len(machine.gpus), {}
    assert machine.link is not None
    times = StepTimes.of(layout_module.shipped_tables(), model, machine.chip, machine.link)
    everything = [Layout(count // ranks, ranks) for ranks in (1, 2, 4, 8) if ranks <= count]
    for layout in (*everything, Layout(count, shares_experts=True)):
        sizes = {"tensor-parallel-size": layout.ranks, "data-parallel-size": layout.engines}
        values = read_profile(profile) | sizes | {"enable-expert-parallel": layout.shares_experts}
        options = engines_of(Config.of(values), count)[0]
        memory = DeviceMemory(machine.gpus[0].total, machine.gpus[0].free)
        sharing = count if layout.shares_experts else 1
        try:
            plan = plan_on_gpus(PUBLISHED[model](), options, memory, layout.ranks, hopper=True, num_sharing=sharing)
        except ValueError:
            continue
        held = min(plan.max_num_seqs, plan.slots[0].count // PAGES)
        if held:
            found = estimate(times, Candidate(layout, held, plan.max_num_batched_tokens), LOADS[profile])
            speeds[layout] = found.output_tok_s if profile == "max_throughput" else found.tok_s_user
    near = [layout for layout, speed in speeds.items() if speed >= (1 - MARGIN) * max(speeds.values())]
    return min(near, key=lambda one: (one.group.num_gpus, -speeds[one]), default=None)


def slower(share: float, table: Table) -> Table:
    """A table of several GPUs with other times; others stay."""
    if table.header.num_gpus == 1:
        return table
    return replace(table, points=tuple(replace(point, ms=share * point.ms) for point in table.points))


@pytest.mark.parametrize(("model", "share"), [("120b", 1.0), ("20b", 0.7)])
def test_the_choice_is_the_best_of_all_layouts(model: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For other step times, memories, links and numbers of GPUs, the choices differ."""
    tables = tuple(slower(share, table) for table in shipped_tables())
    monkeypatch.setattr(layout_module, "shipped_tables", lambda: tables)
    chosen = set()
    for gib, of_h100 in ((24, 0.3), (48, 0.3), (80, 1.0)):
        for count in (2, 4, 8):
            for link in (NVLINK, PCIE):
                machine = Machine((gpu(gib, of_h100),) * count, link)
                for profile in PROFILES:
                    expected = brute_force(model, profile, machine)
                    found, why = choose(model, profile, machine)
                    assert expected is None or found == expected
                    assert ("an estimated" in why) == (expected is not None)
                    chosen.add((count, found))
    assert len(chosen) > 4


@pytest.mark.parametrize(
    ("model", "profile", "expected", "says"),
    [
        ("120b", "low_latency", Layout(1, 2), "tokens/s for one request; next 2 engines of one GPU each, "),
        ("120b", "max_throughput", Layout(2, shares_experts=True), "with full caches; next 1 engine of 2 GPUs, "),
        ("20b", "max_throughput", Layout(2), "and scaled from NVIDIA H200, messages through NVLink)"),
        ("20b", "max_throughput", Layout(2), "; within 5% of 2 engines of one GPU each that share their experts, "),
    ],
)
def test_two_h100(model: str, profile: str, expected: Layout, says: str) -> None:
    """For 120b and many requests, shared experts had 2.9 times the throughput of two engines alone."""
    found, why = choose(model, profile, Machine((H100, H100), NVLINK))
    assert found == expected
    assert says in why
    assert ("measured on NVIDIA H100" in why) == (model == "120b")


@pytest.mark.parametrize(
    ("load", "expected", "measured"),
    [
        ("64:1024:512", Layout(1, 2), (5_503, 5_408, 4_284)),
        ("1024:1024:512", Layout(1, 2), (20_286, 20_582, 11_094)),
        ("64:8192:64", Layout(2), (606, 596, 670)),
    ],
)
def test_an_expected_load_on_two_h100(load: str, expected: Layout, measured: tuple[int, ...]) -> None:
    """The choice has at least 0.95 of the best of the output tokens/s that were measured."""
    found, why = choose("120b", "max_throughput", Machine((H100, H100), NVLINK), **{"expected-load": load})
    assert found == expected
    assert f"output tokens/s for {int(load.split(':')[0]):,} requests" in why
    layouts = (Layout(1, 2), Layout(2, shares_experts=True), Layout(2))
    assert measured[layouts.index(found)] >= 0.95 * max(measured)


def test_without_peer_access_every_gpu_has_an_engine() -> None:
    for profile in PROFILES:
        found, why = choose("120b", profile, Machine((H100,) * 4, None))
        assert (found, why) == (Layout(4), "no peer access: a GPU cannot reach the memory of another")


def test_a_model_larger_than_a_gpu_is_on_ranks_without_peer_access_too() -> None:
    """Engines that share experts would send tokens from GPU to GPU."""
    for profile in PROFILES:
        found, why = choose("120b", profile, Machine((gpu(48, 0.3),) * 2, None))
        assert found == Layout(1, 2)
        assert "messages through the memory of the host" in why


def test_where_nothing_fits_the_start_says_why() -> None:
    found, why = choose("120b", "low_latency", Machine((gpu(16),) * 2, NVLINK))
    assert found == Layout(1, 2)
    assert "estimated" not in why


def test_the_memory_of_a_layout_is_the_least_of_its_gpus() -> None:
    """Wherever the GPU stands whose memory is small, or in use: 120b fits no GPU of 64 GiB, and no busy one."""
    small, busy = replace(H100, total=64 * GIB, free=64 * GIB - GIB // 2), replace(H100, free=40 * GIB)
    for gpus in ((H100, small), (small, H100), (H100, busy), (busy, H100)):
        found, why = choose("120b", "max_throughput", Machine(gpus, None))
        assert found == Layout(1, 2)
        assert "messages through the memory of the host" in why


def test_engines_in_float32_share_no_experts() -> None:
    machine = Machine((H100, H100), NVLINK)
    assert choose("120b", "max_throughput", machine, dtype="float32")[0] != Layout(2, shares_experts=True)


def test_models_of_other_sizes_have_no_estimate() -> None:
    """Such as the embedded one, with --gpus."""
    values = {"profile": "max_throughput", "gpus": "2"}
    assert layout_module.choose(values, 2, Machine((H100, H100), NVLINK)) == (
        Layout(2),
        "--profile max_throughput is for the most tokens per second",
    )


def test_the_server_has_the_layout_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str | None, bool]] = []

    def describe(count: int, visible: str | None, *, peer_access: bool) -> Machine:
        asked.append((count, visible, peer_access))
        return Machine((H100,) * count, NVLINK if peer_access else None)

    monkeypatch.setattr(layout_module, "describe_gpus", describe)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("OSCINE_NO_PEER_ACCESS", raising=False)

    def served(*arguments: str) -> tuple[Config, str]:
        notes: list[str] = []
        config = read_config(vars(parser().parse_args(["gpt-oss-120b", *arguments])), notes.append, 4)
        [note] = notes
        return config, note

    config, note = served("--profile", "max_throughput", "--gpus", "2")
    assert (config.server.data_parallel_size, config.server.enable_expert_parallel) == (2, True)
    assert config.engine.model.tensor_parallel_size == 1
    assert note.startswith("2 GPUs are used as 2 engines of one GPU each that share their experts: an estimated 2")
    assert note.endswith("messages through NVLink). See --gpus")
    config, note = served("--gpus", "2")
    assert (config.server.data_parallel_size, config.engine.model.tensor_parallel_size) == (1, 2)
    assert note.endswith("; --profile max_throughput is for many requests. See --gpus")
    monkeypatch.setenv("OSCINE_NO_PEER_ACCESS", "1")
    config, note = served()
    assert (config.server.data_parallel_size, config.engine.model.tensor_parallel_size) == (4, 1)
    assert "no peer access" in note
    assert asked == [(2, "4,5,6,7", True), (2, "4,5,6,7", True), (4, "4,5,6,7", False)]
