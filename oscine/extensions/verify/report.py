"""What `oscine verify` found: one JSON object, and a page of text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oscine.extensions.bench.machine import Machine
from oscine.extensions.bench.result import Result
from oscine.extensions.verify.bounds import CERTAINTY
from oscine.extensions.verify.compare import Comparison, Part
from oscine.extensions.verify.harmony import HarmonyResult
from oscine.extensions.verify.questions import Answers


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of weights, with what was compared."""

    reference: str  # implementation, with its version
    folder: str  # that the reference read
    fingerprint: str  # of the weights in it
    platform: str  # of the ops
    dtype: str  # of activations
    expert_inputs: str  # as in bounds.Arithmetic
    tokens: int  # of the prompt and generated
    found: Comparison


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    fingerprint: str
    version: str  # of Oscine
    machine: Machine
    layers: int
    compared: Compared
    harmony: HarmonyResult
    answers: Answers | None  # None: not asked
    points: tuple[Result, ...]

    @property
    def difference(self) -> str | None:
        """The first one, in one line."""
        if (found := self.compared.found.first_difference) is not None:
            return f"{found} differs from {self.compared.reference}"
        if self.harmony.differences:
            return f"harmony: {self.harmony.differences[0]} differs from {self.harmony.library}"
        if self.answers is not None and not self.answers.agrees:
            return f"only {self.answers.right} of {self.answers.questions} answers are right"
        return None

    def as_json(self) -> dict[str, Any]:
        found = self.compared.found
        compared = {name: getattr(self.compared, name) for name in Compared.__slots__ if name != "found"}
        return {
            "agrees": self.difference is None,
            "first_difference": self.difference,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "oscine": self.version,
            "machine": asdict(self.machine),
            "comparison": compared | {"parts": [asdict(part) for part in found.parts], "whole": asdict(found.whole)},
            "harmony": asdict(self.harmony),
            "questions": None if self.answers is None else asdict(self.answers),
            "throughput": [asdict(point) for point in self.points],
        }

    def lines(self) -> Iterator[str]:
        compared, whole = self.compared, self.compared.found.whole
        where = self.machine
        yield f"{self.model}, weights {self.fingerprint}: {where.gpu}, torch {where.torch}, commit {where.commit}"
        yield f"reference: {compared.reference}, {compared.folder}, weights {compared.fingerprint}"
        yield ""
        yield f"{self.layers} layers, {compared.tokens} tokens; each part has the reference's input; bounds are for"
        yield f"platform {compared.platform}, {compared.dtype}, experts that multiply {_INPUTS[compared.expert_inputs]}"
        worst = _worst(compared.found.parts)
        equal = [part.name for part in worst if part.ratio == 0]
        yield (
            f"equal bit by bit: {len(equal)} kinds of tensors, such as {equal[0]}"
            if equal
            else "equal bit by bit: none"
        )
        yield f"{'part':<34}  {'error / bound':>13}  {'error':>9}  {'bound':>9}  layer"
        for part in worst:
            if part.ratio == 0:
                continue
            layer = "" if part.layer is None else str(part.layer)
            numbers = f"{part.ratio:>13.3f}  {part.error:>9.2e}  {part.bound:>9.2e}  {layer:>5}"
            yield f"{part.name:<34}  {numbers}{'' if part.agrees else '  DIFFERS'}".rstrip()
        yield ""
        yield f"logits of the whole model: {_line(whole.relative_error, whole.bound, 'relative error')}"
        yield f"  equal most likely tokens: {whole.equal_best:.2%} of {whole.positions} positions"
        yield f"  divergence: {whole.divergence:.2e} nats"
        regret = _line(whole.regret, whole.regret_bound, "largest loss of logit")
        yield f"  greedy tokens: {whole.equal_tokens} of {whole.tokens} equal; {regret}"
        harmony = self.harmony
        wrong = f"; differ: {', '.join(harmony.differences)}" if harmony.differences else ""
        ids = "texts and token ids" if harmony.same_vocabulary else "texts"
        counts = f"{harmony.prompts} prompts and {harmony.completions} completions"
        yield f"harmony: {counts}, {ids}, {harmony.library}{wrong}"
        if self.answers is not None:
            answers = self.answers
            yield f"questions: {answers.right} of {answers.questions} right, {answers.truncated} cut short"
        for point in self.points:
            rates = f"{point.output_tok_s:,.1f} output tokens/s, {point.tok_s_user:,.1f} per user"
            yield f"throughput {point.point}: {rates}, {point.decode_step_ms:.2f} ms per decode step"
        yield ""
        difference = self.difference
        yield (
            f"agrees (bounds are {CERTAINTY:g} standard deviations)" if difference is None else f"DIFFERS: {difference}"
        )


_INPUTS = {
    "int8": "int8 activations",
    "planes": "activations in the dtype, or two FP8 values",
    "exact": "exact activations",
}


def _line(found: float, bound: float, what: str) -> str:
    return f"{what} {found:.2e}, bound {bound:.2e}{'' if found <= bound else '  DIFFERS'}"


def _worst(parts: list[Part]) -> list[Part]:
    """The worst layer of each kind of part, in the order of their first appearance."""
    kinds: dict[str, Part] = {}
    for part in parts:
        if part.name not in kinds or kinds[part.name].ratio < part.ratio:
            kinds[part.name] = part
    return list(kinds.values())
