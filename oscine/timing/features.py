"""What the time of a step depends on: a few numbers of a plan."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from oscine.types import ScheduledSequence


class StepFeatures(NamedTuple):
    """The numbers of one engine's step. A row is a token that reads a cached context; drafts are rows too."""

    decode_rows: int = 0  # sequences with one token, and their drafts
    decode_context: int = 0  # tokens that these rows read, over all rows, their own included
    prompt_tokens: int = 0  # of sequences with several tokens
    prompt_pairs: int = 0  # of a query and a key in full attention, over all chunks: see pairs_of
    prompt_sequences: int = 0  # chunks
    sampled: int = 0  # sequences after which a token is chosen
    drafts: int = 0  # rows that are drafts

    def __str__(self) -> str:
        drafts = f", {self.drafts:,} of them drafts," if self.drafts else ""
        rows = f"{self.decode_rows:,} rows{drafts} that read {self.decode_context:,} tokens"
        chunks = f"{self.prompt_tokens:,} tokens of {self.prompt_sequences:,} prompt{'s' * (self.prompt_sequences > 1)}"
        return " beside ".join([rows] * bool(self.decode_rows) + [chunks] * bool(self.prompt_sequences)) or "no tokens"

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens

    @property
    def sequences(self) -> int:
        """As the executor counts them: a draft is one, too."""
        return self.decode_rows + self.prompt_sequences

    @property
    def verifies(self) -> bool:
        """Whether it verifies drafts, and computes no prompt."""
        return self.drafts > 0 and self.is_decode

    @property
    def is_decode(self) -> bool:
        """Whether each row is one token after which another one is chosen."""
        return not self.prompt_sequences and self.sampled == self.decode_rows - self.drafts


def pairs_of(start: int, tokens: int) -> int:
    """Pairs of a query and a key in a chunk: token i of it reads start + i + 1 tokens."""
    return tokens * start + tokens * (tokens + 1) // 2


def features_of(sequences: Iterable[ScheduledSequence], num_drafts: Sequence[int] | None = None) -> StepFeatures:
    """Of a plan. `num_drafts`: those that each sequence verifies (default: as many as the plan permits)."""
    rows = context = tokens = pairs = chunks = sampled = drafts = 0
    for i, sequence in enumerate(sequences):
        start, length = sequence.start, sequence.num_tokens
        verified = sequence.num_drafts if num_drafts is None else num_drafts[i]
        sampled += sequence.sample
        if length == 1:
            drafts += verified
            rows += 1 + verified
            context += pairs_of(start, 1 + verified)
        else:
            chunks += 1
            tokens += length
            pairs += pairs_of(start, length)
    return StepFeatures(rows, context, tokens, pairs, chunks, sampled, drafts)
