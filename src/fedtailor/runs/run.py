"""A run: its settings, the record of each round, and the models it produced."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fedtailor.core.trees import Params, Tree
from fedtailor.errors import RunError, unknown_name
from fedtailor.runs.records import Record, Values
from fedtailor.runs.summaries import largest_tenth, plain_mean, weighted_mean, worst_tenth

FORMAT = 3  # version of the run folder's format
MOMENTS = ("received", "trained")
CHOICES = ("last", "best_validation", "best_test")


def method_label(method: Mapping[str, Any]) -> str:
    """Return a method's registry key for grouping and folder names; a wrapper method includes the inner one.

    >>> method_label({"name": "lag", "inner": {"name": "scaffold", "lr": 0.1}})
    'lag(scaffold)'
    """
    inner = method.get("inner")
    return f"{method['name']}({method_label(inner)})" if isinstance(inner, Mapping) else str(method["name"])


def resume_hint(folder: Path | None) -> str:
    """Return the command that resumes a run, as the end of a message.

    >>> resume_hint(Path("my runs/one"))
    "resume it with: fedtailor resume 'my runs/one'"
    """
    return f"resume it with: fedtailor resume {shlex.quote(str(folder))}"


def arrays_file(number: int) -> str:
    """Return the path of a round's large arrays inside the run folder."""
    return f"arrays/{number:04d}.safetensors"


@dataclass(eq=False)
class Run:
    """A finished run, or one that is still in progress. `experiment` contains the settings; `info` describes the
    machine and the clients."""

    experiment: dict[str, Any]
    info: dict[str, Any]
    records: Sequence[Record]
    server: Tree
    get_client: Callable[[int], Tree]
    get_personal: Callable[[int, str], Params]
    folder: Path | None = None

    @property
    def method(self) -> str:
        """The method's registry key; a wrapper method includes the inner one: lag(scaffold)."""
        return method_label(self.experiment["method"])

    @property
    def method_title(self) -> str:
        """The method's proper name, for tables and text: Self-FL, LAG (SCAFFOLD)."""
        return str(self.info["method_title"])

    @property
    def num_clients(self) -> int:
        return len(self.info["clients"])

    def client(self, client: int) -> Tree:
        """Return the state of a client."""
        return self.get_client(self._check_client(client))

    def personal(self, client: int, moment: str = "trained") -> Params:
        """Return a client's personal model as an ordinary state_dict: after its latest training ("trained"), or as it
        would start a further round ("received")."""
        self._check_choice(moment, "last")
        return self.get_personal(self._check_client(client), moment)

    def scores(self, moment: str, choice: str = "last", score: str | None = None) -> Values:
        """Return client -> score (for example accuracy) at a moment, in the round that `choice` selects."""
        self._check_choice(moment, choice)
        index = self._select_round(moment, choice)
        return {} if index is None else self._values_at(index, moment, score or self.info["score"])

    def summary(self, local: "Run | None" = None) -> dict[str, Any]:
        """Return moment -> choice of round -> result of `summarize`.

        The choices are `last`, `best_validation` (None without validation data), and `best_test`, which most papers
        report although it is optimistic. The best round is selected among rounds that have scores of all clients.
        """
        return {moment: {choice: self.summarize(moment, choice, local) for choice in CHOICES} for moment in MOMENTS}

    def summarize(self, moment: str, choice: str = "last", local: "Run | None" = None) -> dict[str, Any] | None:
        """Return the summary of one round: the score over all test samples (`weighted`), the mean over clients, the
        mean of the worst 10 % of clients, and the mean of the 10 % with the most training samples; in `metrics`, the
        loss and all other metrics of that round. If `local` is a run of Local on the same clients, the summary includes
        the fractions of clients that score better and worse than with local training.

        `clients` is the number of clients in a mean. Clients without a defined value (such as the AUC of a client with
        one class) are excluded; clients that diverged are included and make the mean NaN.
        """
        self._check_choice(moment, choice)
        index = self._select_round(moment, choice)
        if index is None:
            return None
        values, higher = self._values_at(index, moment, self.info["score"]), self.info["higher_is_better"]
        summary = {
            "round": self.records[index]["round"],
            **self._means(values),
            "worst_tenth": worst_tenth(values, higher),
            "largest_tenth": largest_tenth(values, self._sizes("train")),
            "metrics": {name: self._means(self._values_at(index, moment, name)) for name in self._other_metrics()},
        }
        if local is None:
            return summary
        if local._client_identities() != self._client_identities():
            raise RunError("A run can only be compared with local training on the same clients and test data.")
        return summary | _compare_with_local(values, local.scores(moment, choice), higher)

    def metric(self, name: str) -> dict[int, Any]:
        """Return round -> value of a method metric: a number, or an array as a tensor."""
        known = sorted({key for record in self.records for key in record["method_metrics"]})
        if name not in known:
            raise unknown_name("method metric", name, known)
        values = {r["round"]: r["method_metrics"][name] for r in self.records if name in r["method_metrics"]}
        return {number: self._as_tensor(number, value, name) for number, value in values.items()}

    def _as_tensor(self, number: int, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            from fedtailor.runs.serialization import load_tensors  # needs safetensors, but a run in memory does not

            assert self.folder is not None
            return load_tensors(self.folder / arrays_file(number), value.get("sha256"))[name]
        if not isinstance(value, list):
            return value
        exact = not torch.tensor(value).is_floating_point()
        return torch.tensor(value) if exact else torch.tensor(value, dtype=torch.float64)  # the precision of JSON

    def total(self, name: str) -> float:
        """Return the sum of bytes_up, bytes_down, or seconds over all rounds."""
        return float(sum(record[name] for record in self.records))

    def plot(self, what: str = "curves", **choices: str) -> Any:
        """Return a figure of this run as a plotly figure, which notebooks show: by default, the learning curve at both
        moments.

        `what` is the name of another figure of the report, such as "clients", "split", or "mixing-fedapa". Keywords
        select options of a figure's controls, such as `axis="bytes"`.
        """
        from fedtailor.reporting.plotting import plot_run  # requires plotly and scipy, which training does not need

        return plot_run(self, what, **choices)

    def _means(self, values: Values) -> dict[str, Any]:
        weighted = weighted_mean(values, self._sizes("test"))
        return {"clients": len(values), "weighted": weighted, "mean": plain_mean(values)}

    def _other_metrics(self) -> list[str]:
        """Return the names of all evaluated metrics except the score; they include the loss."""
        names = (name.rpartition("_") for record in self.records for name in record["per_client"])
        found = dict.fromkeys(metric for metric, _, moment in names if moment in MOMENTS)
        return [metric for metric in found if metric not in (self.info["score"], "validation")]

    def _select_round(self, moment: str, choice: str) -> int | None:
        """Return the index of the round. The best round is selected among the last round and those with scores of all
        clients, because scores over different clients are not comparable."""
        score = self.info["score"]
        counts: dict[int, int] = {}  # evaluated round -> number of clients with a score
        all_clients: set[int] = set()
        for i, (record, known) in enumerate(zip(self.records, self.trajectory(moment, score), strict=True)):
            if known and self.is_evaluated(record, moment):
                counts[i] = len(known)
                all_clients.update(known)
        if choice == "last" or not counts:
            return max(counts, default=None)
        validated = choice == "best_validation"
        sizes, sign = self._sizes("validation" if validated else "test"), 1 if self.info["higher_is_better"] else -1
        totals: dict[int, float] = {}
        for i, values in enumerate(self.trajectory(moment, "validation" if validated else score)):
            if counts.get(i) == len(all_clients) or i == max(counts):
                total = weighted_mean(values, sizes)
                if total is not None and math.isfinite(total):
                    totals[i] = sign * total
        return max(totals, key=lambda i: totals[i]) if totals else None

    def is_evaluated(self, record: Record, moment: str) -> bool:
        """Return whether models were evaluated at a moment of this round."""
        return f"loss_{moment}" in record["per_client"]

    def trajectory(self, moment: str, score: str) -> Iterator[Values]:
        """Yield client -> score after each round, of the clients that were evaluated and have a defined score."""
        for record in self.records:
            yield record["per_client"].get(f"{score}_{moment}", {})

    def _values_at(self, index: int, moment: str, score: str) -> Values:
        return dict(next(islice(self.trajectory(moment, score), index, None)))

    def _sizes(self, kind: str) -> list[int]:
        return [client[kind] for client in self.info["clients"]]

    def _client_identities(self) -> list[tuple[str, int]]:
        return [(client["name"], client["test"]) for client in self.info["clients"]]

    def _check_choice(self, moment: str, choice: str) -> None:
        if moment not in MOMENTS:
            raise RunError(f"moment must be 'received' or 'trained', got '{moment}'.")
        if choice not in CHOICES:
            raise unknown_name("choice of a round", choice, CHOICES)

    def _check_client(self, client: int) -> int:
        if not 0 <= client < self.num_clients:
            raise RunError(f"There is no client {client}; clients are numbered 0 to {self.num_clients - 1}.")
        return client


def _compare_with_local(values: Values, local: Mapping[int, float], higher_is_better: bool) -> dict[str, float | None]:
    sign = 1 if higher_is_better else -1
    gains = {client: sign * (value - local[client]) for client, value in values.items() if client in local}
    return {
        "better_than_local": plain_mean({client: float(gain > 0) for client, gain in gains.items()}),
        "worse_than_local": plain_mean({client: float(gain < 0) for client, gain in gains.items()}),
    }
