"""What is run before the first request: every variant of the kernels that choose tokens, no trace of it."""

import pytest

from oscine.executor.cuda_graphs import sizes_up_to
from oscine.executor.kv_memory import SAMPLED_AT_ONCE
from oscine.executor.warm_up import SAMPLINGS, row_counts, warm_up
from oscine.ops.sample.triton import split_rows

from .tiny import executor, loop, model, naive_greedy, options, prompt, request, run

VOCAB = 201088


@pytest.mark.parametrize("most", [1, 2, 7, 50, 64, 100, 128, 300, 1024])
def test_every_number_of_rows_finds_its_kernel_compiled(most: int) -> None:
    def splits(counts: list[int], greedy: bool) -> set[tuple[int, int, int]]:
        return {split_rows(count, VOCAB, greedy) for count in counts}

    assert splits(list(range(1, most + 1)), True) == splits(sizes_up_to(most), True)
    assert splits(list(range(1, min(most, SAMPLED_AT_ONCE) + 1)), False) == splits(row_counts(most), False)


def test_a_warm_executor_answers_like_a_fresh_one() -> None:
    asked = options(max_num_seqs=6)
    runner = executor(model(), asked, 64, 64)
    warm_up(runner, asked.scheduler.max_num_batched_tokens, SAMPLINGS)
    runner.forget_page_zero()
    requests = [request(str(n), prompt(n), max_tokens=9) for n in (3, 40)]
    found = run(loop(runner, asked, runner.memory), *requests)
    for one in requests:
        assert found[one.request_id].token_ids == naive_greedy(tuple(one.prompt_token_ids), 9)
