"""The cost of structured output: streams that must satisfy a schema against unconstrained streams.

    python -m benchmarks.serving.constrained [--streams 64] [--tokens 400] [--step-ms 20] [--model MODEL]

Real HTTP and a real engine process around the fake executor, which makes real masks while its imagined device computes.
All streams start together; free and constrained passes alternate. The schema has free text, bounded text, numbers, an
enumeration, a pattern and nested objects, in a list that is longer than any stream. Prints tokens/s of each pass, the
medians, and the loss of throughput by the constraint.
"""

import argparse
import asyncio
import statistics
import time

from benchmarks.serving.overhead import run_streams
from benchmarks.serving.server import Server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["engineer", "designer", "manager", "writer"]},
        "email": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,12}\\.(com|org)$"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "score": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["name", "age", "role", "email", "address", "score"],
    "additionalProperties": False,
}
PEOPLE = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": PERSON, "minItems": 1000}},
    "required": ["people"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE, "strict": True}}


def tokens_per_s(server: Server, streams: int, tokens: int, **parameters: object) -> float:
    start = time.perf_counter()
    generated, _ = asyncio.run(run_streams(server, streams, tokens, **parameters))
    assert generated == streams * tokens, "a stream ended early"
    return generated / (time.perf_counter() - start)


def measure(args: argparse.Namespace) -> None:
    options = [args.model] if args.model else []
    options += ["--executor", "fake", "--fake-step-s", str(args.step_ms / 1000), "--log-level", "warning"]
    found: dict[str, list[float]] = {"free": [], "constrained": []}
    with Server(*options, "--max-num-seqs", str(args.streams)) as server:
        for repeat in range(args.passes + 1):
            for name, parameters in (("free", {}), ("constrained", {"response_format": FORMAT})):
                cpu = server.cpu_seconds()["engine"]
                rate = tokens_per_s(server, args.streams, args.tokens, **parameters)
                cpu = server.cpu_seconds()["engine"] - cpu
                if repeat:  # the first is a warm-up
                    found[name].append(rate)
                    cost = 1e6 * cpu / (args.streams * args.tokens)
                    print(f"{name}: {rate:,.0f} tokens/s; CPU us/token of the engine process: {cost:.0f}", flush=True)
    free, constrained = (statistics.median(rates) for rates in found.values())
    cost = 1 - constrained / free
    print(
        f"{args.streams} streams, step {args.step_ms:g} ms: {free:,.0f} -> {constrained:,.0f} tokens/s, {cost:.1%} less"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="tokens per stream (default: %(default)s)")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=20.0,
        help="milliseconds that a step of the fake executor takes (default: %(default)s)",
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=3,
        help="measured passes of each kind, after one to warm up (default: %(default)s)",
    )
    parser.add_argument(
        "--model", default="", help="folder with config.json and tokenizer.json; empty is the embedded model"
    )
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
