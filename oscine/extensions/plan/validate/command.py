"""`oscine plan --validate`: how far off the step times of other hardware are."""

import argparse

from oscine.cli.error import ended_by


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--validate",
        action="store_true",
        help="compare the step times of other hardware with published measurements that were not fitted, and exit",
    )
    parser.add_argument(
        "--fit", action="store_true", help="with --validate: fit to the training half first, and store what is found"
    )


def validate(*, refit: bool = False) -> None:
    """Prints the errors. `refit`: fits first, and stores the result in the package. Raises CommandError."""
    from oscine.extensions.plan.foreign.known import ERRORS, FILE, read_fitted, write_errors, write_fitted
    from oscine.extensions.plan.validate import served_runs
    from oscine.extensions.plan.validate.own_runs import lines as own_lines
    from oscine.extensions.plan.validate.own_runs import offs, read_runs
    from oscine.extensions.plan.validate.points import read_points
    from oscine.extensions.plan.validate.ranking import ranking_lines
    from oscine.extensions.plan.validate.report import aisimulate, fit_all, held_out, lines, summary, without_hardware

    with ended_by(OSError):
        points = read_points()
        if refit:
            write_fitted(FILE, fit_all(points))
            read_fitted.cache_clear()
        errors = held_out(points, read_fitted(FILE))
        if refit:
            write_errors(ERRORS, summary(errors))
    print("Curves that were not fitted (TTFT: of points under 5 s; %: mean absolute error; bias: mean error)")
    print(f"AISimulate: {aisimulate()[0]}")
    for line in lines(errors):
        print(line)
    print("\nHardware that was not fitted at all: figures of the others, with the same framework")
    for line in lines(without_hardware(points)):
        print(line)
    print("\nOrder of layouts: is the one with the most tokens/s per GPU, as measured, predicted first, or within two?")
    print("(groups of one hardware, framework, pair of lengths and requests per GPU, with 3 layouts or more;")
    print("lost: tokens/s that the better one of the first two has less than the best one)")
    for line in ranking_lines(points, read_fitted(FILE)):
        print(line)
    print("\nOwn runs that no table of steps saw, simulated with these tables (simulated over measured, less 1)")
    for line in own_lines(offs(read_runs())):
        print(line)
    print("\nOwn servers, simulated with these tables (simulated over measured, less 1)")
    for line in served_runs.lines(served_runs.offs(served_runs.read_runs())):
        print(line)
