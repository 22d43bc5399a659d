"""A run: its settings, the record of each round, and the models it produced."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedtailor.core.code_reference import short_name
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import RunError, unknown_name
from fedtailor.runs.records import COMMON, GLOBAL, TRAIN, Record, Values
from fedtailor.runs.summaries import largest_tenth, plain_mean, weighted_mean, worst_tenth

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 3  # version of the run folder's format
MOMENTS = ("received", "trained")
CHOICES = ("last", "best_validation", "best_test")


def method_label(method: Mapping[str, Any]) -> str:
    """Return a method's registry key, or the name of a user's own class, for labels and folder names; a wrapper method
    includes the inner one.

    >>> method_label({"name": "lag", "inner": {"name": "scaffold", "lr": 0.1}})
    'lag(scaffold)'
    >>> method_label({"name": "my_module:MyMethod"})
    'MyMethod'
    """
    name, inner = short_name(str(method["name"])), method.get("inner")
    return f"{name}({method_label(inner)})" if isinstance(inner, Mapping) else name


def folder_label(method: Mapping[str, Any]) -> str:
    """Return a method's registry key as a part of a folder's name.

    >>> folder_label({"name": "lag", "inner": {"name": "scaffold"}})
    'lag-scaffold'
    """
    return method_label(method).replace("(", "-").replace(")", "")


def all_clients(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what run.json says about every client, in the order of their numbers: held-out clients come last.

    >>> all_clients({"clients": [{"name": "ann"}], "held_out_clients": [{"name": "bob"}]})
    [{'name': 'ann'}, {'name': 'bob'}]
    """
    return [*info["clients"], *info.get("held_out_clients", ())]


def architecture_of(info: Mapping[str, Any], client: int) -> int:
    """Return the number of a client's architecture: its position among the networks in the settings.

    >>> architecture_of({"clients": [{"name": "ann", "architecture": 1}]}, 0)
    1
    """
    return int(all_clients(info)[client].get("architecture", 0))


def client_counts(info: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of clients that train, and the number of held-out clients."""
    return len(info["clients"]), len(info.get("held_out_clients", ()))


def is_complete(experiment: Mapping[str, Any], records: Sequence[Record]) -> bool:
    """Return whether these are the records of all rounds of an experiment, or it stopped early."""
    return len(records) == experiment.get("rounds", len(records)) or _stopped_early(experiment, records)


def _stopped_early(experiment: Mapping[str, Any], records: Sequence[Record]) -> bool:
    # The setting is checked first, because reading a record takes time.
    return "patience" in experiment and bool(records and records[-1].get("stopped_early"))


def resume_hint(folder: Path | None, own_code: bool = False) -> str:
    """Return the command that resumes a run, which may need to import the user's own code, as the end of a message.

    >>> resume_hint(Path("my runs/one"))
    "resume it with: fedtailor resume 'my runs/one'"
    """
    return f"resume it with: fedtailor resume {shlex.quote(str(folder))}{' --allow-code' * own_code}"


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
        """The method's registry key, or the name of your own class; a wrapper method includes the inner one."""
        return method_label(self.experiment["method"])

    @property
    def method_title(self) -> str:
        """The method's proper name, for tables and text: Self-FL, LAG (SCAFFOLD)."""
        return str(self.info["method_title"])

    @property
    def num_clients(self) -> int:
        return len(self.info["clients"])

    @property
    def held_out_clients(self) -> range:
        """The numbers of the clients that never train; their numbers follow those of the others."""
        return range(self.num_clients, len(all_clients(self.info)))

    @property
    def malicious_clients(self) -> list[int]:
        """The clients that attacked in a simulation (`ft.attacks`)."""
        return [number for number, client in enumerate(self.info["clients"]) if client.get("malicious")]

    @property
    def stopped_early(self) -> bool:
        """Whether the run ended before its last round because the validation score had stopped improving."""
        return _stopped_early(self.experiment, self.records)

    @property
    def is_complete(self) -> bool:
        """Whether all rounds are trained, or the run stopped early; False if it was interrupted or is in progress."""
        return is_complete(self.experiment, self.records)

    @property
    def rounds_text(self) -> str:
        """The number of rounds, for text: "20 rounds", or "12 of 100 rounds" of a run that is not complete."""
        done, planned = len(self.records), self.experiment.get("rounds", 0)
        if self.is_complete and not self.stopped_early:
            return f"{done:,} round{'' if done == 1 else 's'}"
        return f"{done:,} of {planned:,} rounds{', stopped early' if self.stopped_early else ''}"

    def __repr__(self) -> str:
        data = self.experiment["data"].get("name", "own data")
        title, clients = f"{self.method_title} on {data}", f"{self.num_clients:,} clients"
        return f"Run({title}, {clients}, {self.rounds_text}, {self._last_score()})"

    def _repr_html_(self) -> str:
        from fedtailor.reporting.notebook.run import run_html

        return run_html(self)

    def _last_score(self) -> str:
        """Return the scores of the last evaluated round at both moments."""
        score = self.info["score"]
        for index in reversed(range(len(self.records))):  # iterating would expand all records in memory
            found = {moment: self.records[index].get(f"{score}_{moment}") for moment in reversed(MOMENTS)}
            values = [f"{value:.3f} {moment}" for moment, value in found.items() if isinstance(value, float)]
            if values:
                return f"{score} {', '.join(values)}"
        return "not evaluated yet"

    def client(self, client: int) -> Tree:
        """Return the state of a client."""
        if client in self.held_out_clients:
            raise RunError(f"Client {client} is held out and has no state; run.personal({client}) returns its model.")
        return self.get_client(self._check_client(client))

    def personal(self, client: int, moment: str = "trained") -> Params:
        """Return a client's personal model as an ordinary state_dict: after its latest training ("trained"), or as it
        would start a further round ("received"). For a held-out client, this is its model after one round of training,
        or when it joins."""
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
        mean of the worst 10 % of clients, the mean of the 10 % with the most training samples, and the score over all
        test samples of the latter; in `metrics`, the loss and all other metrics of that round. If `local` is a run of
        Local on the same clients, the summary includes the fractions of clients that score better and worse than with
        local training.

        If some clients were malicious, `honest` contains the means over the others.

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
            "largest_tenth_weighted": largest_tenth(values, self._sizes("train"), self._sizes("test")),
            "metrics": {
                name: self._means(self._values_at(index, moment, name), name) for name in self._other_metrics()
            },
        }
        if attackers := set(self.malicious_clients):
            honest = {client: value for client, value in values.items() if client not in attackers}
            summary["honest"] = self._means(honest) | {"worst_tenth": worst_tenth(honest, higher)}
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

    def to_pandas(self, per: Literal["round", "client"] = "round") -> "pd.DataFrame":
        """Return the records as a pandas data frame: one row per round, or one row per round and client.

        A row per round has all numbers of its record. A row per client has the client's metrics at both moments and its
        bytes, for each client that took part in the round or was evaluated after it. Missing values are NaN.

        >>> import fedtailor as ft
        >>> fed = ft.load("digits", clients=4)
        >>> run = ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=2)
        >>> len(run.to_pandas()), len(run.to_pandas(per="client"))
        (2, 8)
        """
        from fedtailor.runs.dataframes import clients_frame, rounds_frame

        if per not in ("round", "client"):
            raise unknown_name("kind of rows", str(per), ["round", "client"])
        if per == "round":
            return rounds_frame(self.records)
        return clients_frame(self.records, [client["name"] for client in all_clients(self.info)])

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

    def _means(self, values: Values, metric: str = "") -> dict[str, Any]:
        is_common = "common_test" in self.info and metric.startswith(COMMON)  # then all clients have the same samples
        sizes = self._sizes("train" if metric.startswith(TRAIN) else "test")
        weighted = weighted_mean(values, [1] * len(sizes) if is_common else sizes)
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
        moment = "received" if score.startswith(GLOBAL) else moment  # the global model exists after aggregation only
        return dict(next(islice(self.trajectory(moment, score), index, None)))

    def _sizes(self, kind: str) -> list[int]:
        return [client[kind] for client in all_clients(self.info)]

    def _client_identities(self) -> list[tuple[str, int]]:
        return [(client["name"], client["test"]) for client in self.info["clients"]]

    def _check_choice(self, moment: str, choice: str) -> None:
        if moment not in MOMENTS:
            raise RunError(f"moment must be 'received' or 'trained', got '{moment}'.")
        if choice not in CHOICES:
            raise unknown_name("choice of a round", choice, CHOICES)

    def _check_client(self, client: int) -> int:
        if not 0 <= client < (total := len(all_clients(self.info))):
            raise RunError(f"There is no client {client}; clients are numbered 0 to {total - 1}.")
        return client


def _compare_with_local(values: Values, local: Mapping[int, float], higher_is_better: bool) -> dict[str, float | None]:
    sign = 1 if higher_is_better else -1
    gains = {client: sign * (value - local[client]) for client, value in values.items() if client in local}
    return {
        "better_than_local": plain_mean({client: float(gain > 0) for client, gain in gains.items()}),
        "worse_than_local": plain_mean({client: float(gain < 0) for client, gain in gains.items()}),
    }
