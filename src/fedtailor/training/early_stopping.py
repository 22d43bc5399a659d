"""Early stopping: end a run when its validation score has stopped improving."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fedtailor.runs.records import Record


@dataclass(eq=False)
class EarlyStopping:
    """Counts evaluations without an improvement; a function of the records only, so a resumed run stops as well.

    >>> stopping = EarlyStopping("validation_trained", higher_is_better=True, patience=2)
    >>> [stopping.add({"validation_trained": score}) for score in (0.5, 0.6, 0.6, None, 0.4)]
    [False, False, False, False, True]
    """

    name: str  # of the score in the record
    higher_is_better: bool
    patience: int | None  # None: never stop
    _best: float = -inf
    _evaluations: int = 0  # since the last improvement

    def restore(self, records: Sequence[Record]) -> "EarlyStopping":
        """Add the records of earlier rounds."""
        for index in range(len(records) if self.patience is not None else 0):  # iterating would expand all records
            self.add(records[index])
        return self

    def add(self, record: Record) -> bool:
        """Add the record of a round and return whether the run stops after it; rounds without a score do not count."""
        score = record.get(self.name)
        if score is None or self.patience is None:
            return False
        signed = score if self.higher_is_better else -score
        improved = signed > self._best  # false if the score is not a number
        self._best, self._evaluations = (signed, 0) if improved else (self._best, self._evaluations + 1)
        return self._evaluations >= self.patience
