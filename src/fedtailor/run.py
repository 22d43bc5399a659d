"""A run: what happened, round by round, and the models it left."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fedtailor.errors import Refused, unknown
from fedtailor.evaluation import largest_tenth, plain_mean, weighted_mean, worst_tenth
from fedtailor.lines import Record, Values
from fedtailor.trees import Params, Tree

FORMAT = 1  # of a run's folder; another number is another format
MOMENTS = ("received", "trained")
CHOICES = ("last", "best_validation", "best_test")


def name_of(method: Mapping[str, Any]) -> str:
    """A method's name as tables and folders have it.

    >>> name_of({"name": "lag", "inner": {"name": "scaffold", "lr": 0.1}})
    'lag(scaffold)'
    """
    inner = method.get("inner")
    return f"{method['name']}({name_of(inner)})" if isinstance(inner, Mapping) else str(method["name"])


def go_on_with(folder: Path | None) -> str:
    """How a run is resumed, in words that can be copied.

    >>> go_on_with(Path("my runs/one"))
    "go on with: fedtailor resume 'my runs/one'"
    """
    return f"go on with: fedtailor resume {shlex.quote(str(folder))}"


def arrays_file(number: int) -> str:
    """Where in a run's folder the large arrays of a round lie."""
    return f"arrays/{number:04d}.safetensors"


@dataclass(eq=False)
class Run:
    """A finished run, or one that goes on. `experiment` is what was asked for, `info` what was found: where it ran,
    who the clients are."""

    experiment: dict[str, Any]
    info: dict[str, Any]
    records: Sequence[Record]
    server: Tree
    get_client: Callable[[int], Tree]
    get_personal: Callable[[int, str], Params]
    folder: Path | None = None

    @property
    def method(self) -> str:
        """The method's name; of one around another, both: lag(scaffold)."""
        return name_of(self.experiment["method"])

    @property
    def num_clients(self) -> int:
        return len(self.info["clients"])

    def client(self, client: int) -> Tree:
        """The state client i keeps."""
        return self.get_client(self._known(client))

    def personal(self, client: int, moment: str = "trained") -> Params:
        """Client i's own model as an ordinary state_dict: as it last trained, or as if a further round began."""
        self._check(moment, "last")
        return self.get_personal(self._known(client), moment)

    def scores(self, moment: str, choice: str = "last", score: str | None = None) -> Values:
        """Every evaluated client's score (accuracy, say) at a moment, in the round that `choice` picks."""
        self._check(moment, choice)
        picked = self._pick_round(moment, choice)
        return {} if picked is None else self._known_in(picked, moment, score or self.info["score"])

    def summary(self, alone: "Run | None" = None) -> dict[str, Any]:
        """Moment -> choice of round -> `numbers`.

        The choices: `last`; `best_validation`, None without validation data; `best_test`, which is what most papers
        print, and optimistic; both are sought among the rounds in which all clients are known.
        """
        return {moment: {choice: self.numbers(moment, choice, alone) for choice in CHOICES} for moment in MOMENTS}

    def numbers(self, moment: str, choice: str = "last", alone: "Run | None" = None) -> dict[str, Any] | None:
        """One choice of the summary: the score over all test samples (`weighted`), as the plain mean over clients, of
        the worst 10 % of clients, and of the 10 % with most training samples; `metrics`: the loss and all other metrics
        in the same round; with a run of Local on the same clients, the shares that do better and worse than `alone`.

        `clients` says over how many a number is: who has no defined value (the AUC of a client with one class) is left
        out; who diverged is not, and makes a mean NaN.
        """
        self._check(moment, choice)
        picked = self._pick_round(moment, choice)
        if picked is None:
            return None
        values, better = self._known_in(picked, moment, self.info["score"]), self.info["higher_is_better"]
        numbers = {
            "round": self.records[picked]["round"],
            **self._means(values),
            "worst_tenth": worst_tenth(values, better),
            "largest_tenth": largest_tenth(values, self._sizes("train")),
            "metrics": {name: self._means(self._known_in(picked, moment, name)) for name in self._other_metrics()},
        }
        if alone is None:
            return numbers
        if alone._identities() != self._identities():
            raise Refused("A run can only be compared with training alone on the same clients and test data.")
        return numbers | _against(values, alone.scores(moment, choice), better)

    def monitor(self, name: str) -> dict[int, Any]:
        """Round -> what the method recorded of itself under that name: a number, or an array as a tensor."""
        known = sorted({key for record in self.records for key in record["monitor"]})
        if name not in known:
            raise unknown("monitor", name, known)
        values = {r["round"]: r["monitor"][name] for r in self.records if name in r["monitor"]}
        return {number: self._array(number, value, name) for number, value in values.items()}

    def _array(self, number: int, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            from fedtailor.record import load_tensors  # needs safetensors, which a run in memory does not

            assert self.folder is not None
            return load_tensors(self.folder / arrays_file(number), value.get("sha256"))[name]
        if not isinstance(value, list):
            return value
        whole = not torch.tensor(value).is_floating_point()
        return torch.tensor(value) if whole else torch.tensor(value, dtype=torch.float64)  # as precise as the record

    def total(self, name: str) -> float:
        """The sum of bytes_up, bytes_down or seconds over the rounds."""
        return float(sum(record[name] for record in self.records))

    def _means(self, values: Values) -> dict[str, Any]:
        weighted = weighted_mean(values, self._sizes("test"))
        return {"clients": len(values), "weighted": weighted, "mean": plain_mean(values)}

    def _other_metrics(self) -> list[str]:
        """All that is evaluated besides the score, the loss among it."""
        names = (name.rpartition("_") for record in self.records for name in record["per_client"])
        found = dict.fromkeys(metric for metric, _, moment in names if moment in MOMENTS)
        return [metric for metric in found if metric not in (self.info["score"], "validation")]

    def _pick_round(self, moment: str, choice: str) -> int | None:
        """Position of the round. The best is sought among rounds that know all clients, for over other clients a
        score is another quantity; the last always counts."""
        score = self.info["score"]
        counts: dict[int, int] = {}  # evaluated round -> clients known
        everyone: set[int] = set()
        for i, (record, known) in enumerate(zip(self.records, self.trajectory(moment, score), strict=True)):
            if known and self.is_evaluated(record, moment):
                counts[i] = len(known)
                everyone.update(record["per_client"].get(f"{score}_{moment}", {}))
                everyone.update(record.get("last_trained", {}).get(score, {}) if moment == "trained" else {})
        if choice == "last" or not counts:
            return max(counts, default=None)
        validated = choice == "best_validation"
        sizes, sign = self._sizes("validation" if validated else "test"), 1 if self.info["higher_is_better"] else -1
        totals: dict[int, float] = {}
        for i, judged in enumerate(self.trajectory(moment, "validation" if validated else score)):
            if counts.get(i) == len(everyone) or i == max(counts):
                total = weighted_mean(judged, sizes)
                if total is not None and math.isfinite(total):
                    totals[i] = sign * total
        return max(totals, key=lambda i: totals[i]) if totals else None

    def is_evaluated(self, record: Record, moment: str) -> bool:
        """Whether a round of the record says how good models were at a moment."""
        return f"loss_{moment}" in record["per_client"] or (moment == "trained" and "last_trained" in record)

    def trajectory(self, moment: str, score: str) -> Iterator[Values]:
        """What is known after every round, to be looked at before the next. received: of that round alone. trained: of
        every client as it last trained, for absent clients are as they last were; who was evaluated and has no defined
        score now, has none."""
        latest: Values = {}
        for record in self.records:
            here = record["per_client"].get(f"{score}_{moment}", {})
            if moment == "received":
                yield here
                continue
            latest.update(here)
            for client in record["per_client"].get(f"loss_{moment}", {}).keys() - here.keys():
                latest.pop(client, None)
            yield record.get("last_trained", {}).get(score, latest)

    def _known_in(self, picked: int, moment: str, score: str) -> Values:
        return dict(next(islice(self.trajectory(moment, score), picked, None)))

    def _sizes(self, kind: str) -> list[int]:
        return [client[kind] for client in self.info["clients"]]

    def _identities(self) -> list[tuple[str, int]]:
        return [(client["name"], client["test"]) for client in self.info["clients"]]

    def _check(self, moment: str, choice: str) -> None:
        if moment not in MOMENTS:
            raise Refused(f"A moment is 'received' or 'trained', not '{moment}'.")
        if choice not in CHOICES:
            raise unknown("choice of a round", choice, CHOICES)

    def _known(self, client: int) -> int:
        if not 0 <= client < self.num_clients:
            raise Refused(f"There is no client {client}; there are 0 to {self.num_clients - 1}.")
        return client


def _against(values: Values, alone: Mapping[int, float], higher_is_better: bool) -> dict[str, float | None]:
    sign = 1 if higher_is_better else -1
    gains = {client: sign * (value - alone[client]) for client, value in values.items() if client in alone}
    return {
        "better_than_alone": plain_mean({client: float(gain > 0) for client, gain in gains.items()}),
        "worse_than_alone": plain_mean({client: float(gain < 0) for client, gain in gains.items()}),
    }
