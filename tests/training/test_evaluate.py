"""The evaluation: questions of several skills in one go, and answers that are told apart again."""

import pytest

from oscine.settings.config import EngineOptions, ModelOptions
from training import evaluate
from training.evaluate import NANO, SKILLS, Asked, answer, compare
from training.packing import Encoder

ENCODER = Encoder(NANO)
ASKED = [Asked.of(skill, count) for skill, count in zip(SKILLS, (2, 3, 1), strict=False)]


def test_answers_of_several_skills_are_told_apart() -> None:
    right = [ENCODER.renderer.render_completion(made.completion) for one in ASKED for made in one.samples]
    wrong = [right[0], right[0], *right[2:]]
    for outputs, counts in ((right, [0, 0, 0]), (wrong, [1, 0, 0])):
        texts = answer(lambda prompts, most, grammars, found=outputs: found, ENCODER, ASKED)
        assert [len(of_skill) for of_skill in texts] == [2, 3, 1]
        assert [len(one.wrong(of_skill)) for one, of_skill in zip(ASKED, texts, strict=True)] == counts


@pytest.mark.long
def test_engines_are_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "COMPARED_CACHE", 64 << 20)
    options = EngineOptions(ModelOptions(str(NANO), device="cpu"), quiet=True, num_threads=1)
    compare(ENCODER, ASKED, {"one": options, "other": options})
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| o")]
    assert rows == ["| one | 6 of 6 | 100.00% | 0 |", "| other | 6 of 6 | 100.00% | 0 |"]
