"""Trains the byte-level BPE of oscine-nano on generated conversations.

Words in lower case carry the space before them; digits, capitalised words and identifiers never do. So a name has the
same tokens in a sentence, in JSON and in a signature, and is copied token by token.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from oscine.chat.harmony import HarmonyRenderer
from training.conversations import sample
from training.split import Draw

VOCAB_SIZE = 1920  # special tokens included
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
# looked at once: without a bound, each space of a long run searches for a line break after all of them
_MAX_SPACES = 16
_PIECES = "|".join(
    (
        r"\p{N}",
        r" (?>\p{Ll}+)(?=[\s.,;:!?')]|$)",
        r"'(?:s|t|m|d|ll|re|ve)(?!\p{L})",
        r"\p{Lu}\p{Ll}*",
        r"\p{Ll}+",
        r"[\p{L}\p{M}]+",
        rf"\s{{0,{_MAX_SPACES}}}[\r\n]+",
        rf" {{1,{_MAX_SPACES}}}",
        r"[^\s\p{L}\p{N}]+",
        r"\s+",
    )
)


class _Recorder:
    """Replaces a tokenizer while conversations are rendered, and keeps the text."""

    start = end = message = channel = constrain = return_ = call = endoftext = 0

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return []


def corpus(num_conversations: int, seed: int) -> Iterator[str]:
    draw, recorder = Draw(seed), _Recorder()
    renderer = HarmonyRenderer(recorder)  # type: ignore[arg-type]
    for _ in range(num_conversations):
        made = sample(draw)
        renderer.render(made.conversation)
        renderer.render_completion(made.completion)
        yield from (text[:2000] for text in recorder.texts)
        recorder.texts.clear()


def train_tokenizer(folder: Path, num_conversations: int = 20_000, seed: int = 0) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(False, False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(num_conversations, seed), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    config = {**names, "clean_up_tokenization_spaces": False, "model_max_length": 131072}
    _write(folder / "tokenizer_config.json", {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    _write(folder / "special_tokens_map.json", names)


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    train_tokenizer(Path("oscine/model/nano"))
