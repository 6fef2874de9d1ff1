"""A table of step times that remembers where its answers came from."""

from oscine.timing.answer import Cell, Class, worst
from oscine.timing.features import StepFeatures
from oscine.timing.table import StepTable


class NotedTable(StepTable):
    """`figures` is the worst class of all answers, and `factor` the largest one."""

    def __init__(self, table: StepTable) -> None:
        self.header, self.points = table.header, table.points
        self._table = table
        self.figures: Class = "measured"
        self.factor = 1.0

    def cell(self, step: StepFeatures) -> Cell:
        found = self._table.cell(step)
        self.figures, self.factor = worst(self.figures, found.figures), max(self.factor, found.factor)
        return found

    def __str__(self) -> str:
        grown = f", beyond the measured steps by up to {self.factor:.1f}" if self.factor > 1.0 else ""
        return f"{self.figures}{grown}"
