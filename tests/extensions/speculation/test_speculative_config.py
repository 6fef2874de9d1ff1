"""--speculative-config as TensorRT-LLM and vLLM write it, on the command line, in a file and in Python."""

from pathlib import Path

import pytest

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_options
from oscine.cli.serve.read_options import read_config
from oscine.llm.options import read
from oscine.settings.config import SpeculationOptions


def speculation_of(*arguments: str) -> tuple[SpeculationOptions, list[str]]:
    """What becomes of the options, and what was said to have no effect."""
    parser = Parser(prog="oscine serve", allow_abbrev=False)
    add_options(parser)
    notes: list[str] = []
    return read_config(vars(parser.parse_args(arguments)), notes.append).engine.speculation, notes


MEANINGS = [
    ("none", SpeculationOptions("none")),
    ("ngram", SpeculationOptions("ngram")),
    ("auto", SpeculationOptions()),
    ("{}", SpeculationOptions()),
    ('{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}', SpeculationOptions("eagle3", 3, "head")),
    ("{decoding_type: Eagle, max_draft_len: 1, speculative_model_dir: head}", SpeculationOptions("eagle3", 1, "head")),
    ("{decoding_type: Eagle3, max_draft_len: 3}", SpeculationOptions("eagle3", 3)),
    ("{decoding_type: NGram, max_draft_len: 6}", SpeculationOptions("ngram", 6)),
    ('{"model": "head", "num_speculative_tokens": 3, "method": null}', SpeculationOptions("eagle3", 3, "head")),
    ("{decoding_type: AUTO, speculative_model_dir: head}", SpeculationOptions("eagle3", model="head")),
    (
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3}',
        SpeculationOptions("ngram", 5, lookup_min=3, lookup_max=6),
    ),
    ("{prompt_lookup_max: 4}", SpeculationOptions("ngram", lookup_max=4)),
    ("max_draft_len: 2", SpeculationOptions("auto", 2)),
]


@pytest.mark.parametrize(("text", "expected"), MEANINGS)
def test_what_others_write(tmp_path: Path, text: str, expected: SpeculationOptions) -> None:
    assert speculation_of("--speculative-config", text) == (expected, [])
    (file := tmp_path / "options.yaml").write_text(f"speculative_config:\n  {text}\n")
    assert speculation_of("--extra-llm-api-options", str(file)) == (expected, [])


def test_python_takes_a_mapping() -> None:
    given = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}}
    assert read("oscine-nano", given, 1).engine.speculation == SpeculationOptions("ngram", 2)


def test_nothing_given_leaves_the_default(tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text("speculative_config: null")
    assert speculation_of("--config", str(file)) == speculation_of() == (SpeculationOptions("none"), [])


def test_what_has_no_effect_is_said() -> None:
    _, notes = speculation_of(
        "--speculative-config", "{decoding_type: Eagle, eagle3_one_model: true, max_concurrency: 4}"
    )
    assert [note.partition(" ")[0] for note in notes] == [
        "speculative_config.eagle3_one_model",
        "speculative_config.max_concurrency",
    ]


def test_a_head_compares_no_tokens() -> None:
    read, notes = speculation_of("--speculative-config", "{method: eagle3, prompt_lookup_max: 4, prompt_lookup_min: 3}")
    assert read.method == "eagle3"
    assert notes == [
        f"speculative_config.prompt_lookup_{end} has no effect: it is for ngram, not eagle3" for end in ("max", "min")
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{max_draft_length: 3}", "unknown key 'max_draft_length'; did you mean max_draft_len?"),
        ("{method: medusa}", "method must be eagle3, ngram, auto or none, not 'medusa'"),
        ("medusa", "method must be eagle3, ngram, auto or none, not 'medusa'"),
        ("{max_draft_len: 0}", "max_draft_len must be above 0 and at most 16, not 0"),
        ("{num_speculative_tokens: many}", "num_speculative_tokens must be a whole number, not 'many'"),
        ("{max_draft_len: 1, num_speculative_tokens: 2}", "max_draft_len and num_speculative_tokens say the same"),
        ("{prompt_lookup_min: 9}", "prompt_lookup_min must be at most prompt_lookup_max"),
        ("{method: ngram, model: head}", "a model goes with eagle3, not ngram"),
        ("[1]", "must be auto, ngram, eagle3 or none, or a mapping"),
        ("{", "is neither JSON nor YAML: line 1: expected the node content"),
    ],
)
def test_what_cannot_be_meant_names_the_key(text: str, named: str) -> None:
    with pytest.raises(CommandError) as caught:
        speculation_of("--speculative-config", text)
    assert named in str(caught.value)
    assert caught.value.status == USAGE
