"""The embedded model, a trained gpt-oss, on four and eight ranks: the tokens of one rank, in both ways to divide it.

Ranks are threads. With eight of them each KV head is on four ranks, and each rank has 32 columns of every expert.
"""

import pytest

pytest.importorskip("msgspec", reason="the skills of the embedded model need it")

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.core.loop import EngineLoop
from oscine.executor.start.load import load_executor
from oscine.executor.start.stopwatch import Stopwatch
from oscine.ops.target import Communicator
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import GenerationRequest
from tests.executor.tiny import request, run
from tests.extensions.parallel.test_lockstep import alone, in_lockstep
from tests.ops.ranks import on_every_rank
from training.evaluate import SEED, SKILLS
from training.packing import Encoder
from training.split import Draw

SHOWN = ("addition, up to 3 digits", "tool call", "JSON valid for the schema", "recall at 500 tokens")
OPTIONS = EngineOptions(
    model=ModelOptions(str(NANO_FOLDER), device="cpu", max_model_len=2048),
    cache=CacheOptions(kv_cache_bytes=64 << 20),
    scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=256, overlap=False),
    num_threads=1,
    quiet=True,
)


@pytest.fixture(scope="module")
def asked() -> list[GenerationRequest]:
    """Held-out questions. One of each kind is sampled."""
    encoder, found = Encoder(NANO_FOLDER), []
    for skill in (skill for skill in SKILLS if skill.name in SHOWN):
        for n in range(2):
            ids = encoder.prompt(skill.make(Draw(SEED + n, held_out=True)))
            found.append(request(f"{skill.name} {n}", ids, max_tokens=24, temperature=0.7 * n, seed=n))
    return found


@pytest.fixture(scope="module")
def expected(asked: list[GenerationRequest]) -> dict[str, list[int]]:
    return alone(OPTIONS, *asked)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_tensor_parallelism(asked: list[GenerationRequest], expected: dict[str, list[int]], num_ranks: int) -> None:
    def answers(communicator: Communicator) -> dict[str, list[int]]:
        executor = load_executor(OPTIONS, lambda text: None, Stopwatch(), lambda opened: communicator).executor
        slots, most = executor.memory.slots, executor.memory.max_model_len
        engine = EngineLoop(executor, OPTIONS, groups=executor.memory.groups, memory=slots, max_model_len=most)
        outputs = run(engine, *asked)
        return {name: output.token_ids for name, output in outputs.items()}

    assert on_every_rank(num_ranks, answers) == [expected] * num_ranks


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_shared_experts_and_requests_of_their_own(
    asked: list[GenerationRequest], expected: dict[str, list[int]], num_ranks: int
) -> None:
    """Attention data parallelism. Loads are uneven, and the last engine has none."""
    shares = [asked[rank :: num_ranks - 1] for rank in range(num_ranks - 1)]
    uses = [(lambda client, mine=mine: client.run(*mine)) for mine in (*shares, [])]
    found = in_lockstep(OPTIONS, *uses)
    assert {name: tokens for _, of_rank in found for name, tokens in of_rank.items()} == expected
