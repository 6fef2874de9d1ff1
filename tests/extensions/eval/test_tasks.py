"""Task files, published test sets, and files of answers."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from oscine.extensions.eval import published, results, task
from oscine.extensions.eval.compare import CompareError, Comparison
from oscine.extensions.eval.grade import Answer
from oscine.extensions.eval.results import ResultsError, ResultsFile, Row, Run
from oscine.extensions.eval.task import Task, TaskError
from training.tasks import lines

LINE = {"id": "a", "prompt": "What is 1 + 1?", "answer": {"number": 2}}
RUN = Run("oscine-nano", {"temperature": 0.0})


def write(path: Path, *found: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in found))
    return path


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    full = {
        "id": "b",
        "group": "greetings",
        "messages": messages,
        "tools": tools,
        "response_schema": {"type": "object"},
        "parameters": {"max_tokens": 9},
        "answer": {"json": {}},
    }
    short, long = task.read(write(tmp_path / "t.jsonl", LINE, "", full))
    assert (short.id, short.group, short.body) == (
        "a",
        "tasks",
        {"messages": [{"role": "user", "content": "What is 1 + 1?"}]},
    )
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
    assert long.body == {"messages": messages, "tools": tools, "response_format": form, "max_tokens": 9}
    assert long.group == "greetings"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no JSON", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "line: must be an object"),
        (LINE | {"id": ""}, "id: must be a text"),
        (LINE | {"id": 5}, "id: must be a text"),
        (LINE | {"id": "first"}, "id: 'first' is the id of an earlier line"),
        (LINE | {"group": None}, "group: must be a text"),
        (LINE | {"promt": "x"}, "promt: is unknown; did you mean prompt?"),
        (LINE | {"messages": []}, "messages: either prompt or messages"),
        ({"id": "a", "answer": {"number": 2}}, "messages: either prompt or messages"),
        (LINE | {"prompt": None}, "prompt: must be a text"),
        ({"id": "a", "messages": [], "answer": {"number": 2}}, "messages: must be a list"),
        ({"id": "a", "messages": [{"role": "user"}, "x"], "answer": {"number": 2}}, "messages[1]: must be an object"),
        (LINE | {"tools": {}}, "tools: must be a list"),
        (LINE | {"response_schema": True}, "response_schema: must be an object"),
        (LINE | {"parameters": []}, "parameters: must be an object"),
        (LINE | {"parameters": {"n": 2}}, "parameters.n: is set elsewhere"),
        (LINE | {"response_schema": {}, "parameters": {"response_format": {}}}, "parameters.response_format: is set"),
        ({"id": "a", "prompt": "x"}, "answer: is missing"),
        (LINE | {"answer": {"choice": "Z"}}, "answer.choice: must be a letter from A to D"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: Any, said: str) -> None:
    path = write(tmp_path / "t.jsonl", LINE | {"id": "first"}, "", line)
    with pytest.raises(TaskError) as raised:
        task.read(path)
    assert str(raised.value).startswith(f"{path}:3: {said}")


def test_an_empty_file_has_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no tasks"):
        task.read(write(tmp_path / "t.jsonl", ""))


def test_a_limit_chooses_the_same_tasks_of_a_longer_file() -> None:
    tasks = [Task.of(LINE | {"id": str(index)}) for index in range(50)]
    few, more = task.some(tasks, 5), task.some(tasks, 20)
    assert len(few) == 5
    assert {one.id for one in few} <= {one.id for one in more}
    assert few != tasks[:5]
    assert [one for one in tasks if one in more] == more
    assert task.some(tasks, None) == task.some(tasks, 100) == tasks


def test_the_skills_of_the_embedded_model_are_tasks(tmp_path: Path) -> None:
    count = task.write(tmp_path / "skills.jsonl", lines(1))
    found = task.read(tmp_path / "skills.jsonl")
    assert count == len(found) > 40
    kinds = {one.expected.kind for one in found}
    assert kinds == {"text", "json", "schema", "call", "ends"}
    choices = [one.body.get("tool_choice") for one in found]
    assert "required" in choices
    assert any(isinstance(choice, dict) for choice in choices)


# ---- published sets ----

GPQA = (
    "Pre-Revision Question,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,"
    "High-level domain,Record ID\n"
    'old,"Which one, of these?",right,wrong 1,"wrong, 2","wrong\n3",Physics,rec1\n'
    "old,And which now?,right,wrong 1,wrong 2,wrong 3,Biology,rec2\n"
    "old,And which at last?,right,wrong 1,wrong 2,wrong 3,Biology,rec3\n"
)


def test_gpqa(tmp_path: Path) -> None:
    path = tmp_path / "gpqa.csv"
    path.write_text(GPQA)
    found = [Task.of(line) for line in published.read_gpqa(path)]
    assert [one.id for one in found] == ["gpqa/rec1", "gpqa/rec2", "gpqa/rec3"]
    assert [one.group for one in found] == ["gpqa/Physics", "gpqa/Biology", "gpqa/Biology"]
    for one in found:
        prompt = one.body["messages"][0]["content"]
        assert f"\n{one.expected.value}) right\n" in prompt
        assert all(f"\n{letter}) " in prompt for letter in "ABCD")
        assert one.expected.grade(Answer(f"Hm.\n\nAnswer: {one.expected.value}")).is_right
    assert "wrong, 2" in found[0].body["messages"][0]["content"]
    assert len({one.expected.value for one in found}) > 1, "the right choice is not always at one place"


def test_aime(tmp_path: Path) -> None:
    rows = [{"problem": "Find N.", "answer": "070", "id": "0"}, {"problem": "And the angle?", "answer": "336^\\circ"}]
    found = [Task.of(line) for line in published.read_aime(write(tmp_path / "aime.jsonl", *rows))]
    assert [(one.id, one.expected.value) for one in found] == [("aime/0", 70), ("aime/2", 336)]
    assert found[0].expected.grade(Answer("So N is $70$.\n\nAnswer: 70")).is_right


def archive(**files: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            made.addfile(member, io.BytesIO(text.encode()))
    return data.getvalue()


def test_mmlu(tmp_path: Path) -> None:
    path = tmp_path / "data.tar"
    law = 'Is it "so", here?,yes,no,maybe,never,C\nAnd\nthere?,1,2,3,4,A\n'.replace("And\nthere?", '"And\nthere?"')
    law = law.replace('Is it "so", here?', '"Is it ""so"", here?"')
    path.write_bytes(
        archive(
            **{
                "data/test/international_law_test.csv": law,
                "data/test/anatomy_test.csv": "Where?,a,b,c,d,D\n",
                "data/dev/anatomy_dev.csv": "Not this?,a,b,c,d,A\n",
                "data/README.txt": "no, table",
            }
        )
    )
    found = [Task.of(line) for line in published.read_mmlu(path)]
    assert [(one.id, one.expected.value) for one in found] == [
        ("mmlu/international_law/1", "C"),
        ("mmlu/international_law/2", "A"),
        ("mmlu/anatomy/1", "D"),
    ]
    assert (
        found[0].body["messages"][0]["content"].startswith('Is it "so", here?\n\nA) yes\nB) no\nC) maybe\nD) never\n\n')
    )


# ---- files of answers ----


@pytest.fixture
def tasks() -> list[Task]:
    return [Task.of(LINE | {"id": name, "group": name}) for name in "abc"]


def test_a_file_keeps_answers_and_not_failures(tmp_path: Path, tasks: list[Task]) -> None:
    path = tmp_path / "answers.jsonl"
    file = ResultsFile(path, RUN, tasks)
    assert file.kept == {}
    right, wrong = (Row.of(tasks[index], 0, Answer(text), 7) for index, text in enumerate(("It is 2.", "It is 3.")))
    for row in (right, wrong, Row.failed(tasks[2], 0, "500: no")):
        file.append(row)
    with pytest.raises(ResultsError, match="another run is writing"):
        ResultsFile(path, RUN, tasks)
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])  # killed within a line
    again = ResultsFile(path, RUN, tasks)
    assert again.kept == {("a", 0): right, ("b", 0): wrong}
    again.append(Row.of(tasks[2], 0, Answer("2"), None))
    again.close()
    run, rows = results.read(path)
    assert run == RUN
    assert [(row.right, row.found, row.output_tokens, row.error) for row in rows.values()] == [
        (True, "2", 7, ""),
        (False, "3", 7, ""),
        (True, "2", None, ""),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("my diary", ":1: not a line of answers"),
        ("my diary\n", ":1: not a line of answers"),
        ('{"run": {"model": "x"}}\n', ":1: not a line of answers"),
        ('{"run": {"model": "x", "parameters": {}}}\n', " is of another run: of the model x, not oscine-nano"),
        (
            '{"run": {"model": "oscine-nano", "parameters": {}}}\n',
            ' is of another run: with {}, not {"temperature": 0.0}',
        ),
        ('{"run": {"model": "oscine-nano", "parameters": {"temperature": 0.0}}}\n{}\n', ":2: not a line of answers"),
    ],
)
def test_another_file_is_left_alone(tmp_path: Path, tasks: list[Task], text: str, said: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(ResultsError) as raised:
        ResultsFile(path, RUN, tasks)
    assert str(raised.value).startswith(f"{path}{said}")
    assert path.read_text() == text


def test_a_task_that_changed_is_another_one(tmp_path: Path, tasks: list[Task]) -> None:
    path = tmp_path / "answers.jsonl"
    file = ResultsFile(path, RUN, tasks)
    file.append(Row.of(tasks[0], 0, Answer("2"), 1))
    file.close()
    changed = [Task.of(LINE | {"answer": {"number": 3}})]
    with pytest.raises(ResultsError, match="another task 'a'"):
        ResultsFile(path, RUN, changed)


def rows_of(**rights: list[bool]) -> list[Row]:
    return [Row(name, "g", "d", i, right) for name, found in rights.items() for i, right in enumerate(found)]


def test_a_comparison() -> None:
    first = rows_of(a=[True, True], b=[True, False], c=[False, False], d=[True, True], only=[True, True])
    second = rows_of(d=[True, True], c=[True, True], b=[False, False], a=[True, False])
    found = Comparison.of(first, second)
    assert (found.num_only_first, found.num_only_second) == (1, 0)
    assert found.difference.value == pytest.approx(0.0)
    assert [(name, str(a), str(b)) for name, a, b in found.changed()] == [
        ("a", "2/2", "1/2"),
        ("b", "1/2", "0/2"),
        ("c", "0/2", "2/2"),
    ]
    assert found.p == 1.0
    assert not found.is_single


def test_a_comparison_of_different_numbers_of_answers() -> None:
    """Three answers and two: in sixths, the gains are -1, 3 and 2. Of eight choices of signs, four reach 4."""
    first = rows_of(a=[True, True, False], b=[False] * 3, c=[True, True, False])
    second = rows_of(a=[True, False], b=[True, False], c=[True, True])
    found = Comparison.of(first, second)
    gains = [-1, 3, 2]
    assert found.difference.value == pytest.approx(sum(gains) / 18)
    assert found.p == pytest.approx(4 / 8)


def test_what_cannot_be_compared() -> None:
    one = rows_of(a=[True])
    for other, said in (
        (rows_of(b=[True]), "no task in common"),
        (rows_of(a=[True, True], c=[True]), "'c' has 1 of 2 answers"),
        ([Row("a", "g", "another", 0, True)], "'a' is not the same one"),
    ):
        with pytest.raises(CompareError, match=said):
            Comparison.of(one, other)
