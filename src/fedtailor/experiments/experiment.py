"""Experiments: the same settings as a dataclass, as a TOML file, and as command-line flags.

rounds = 20
[method]
name = "fedper"
lr = 0.1
[data]
name = "digits"
[network]
name = "mlp"
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from fedtailor.core.client_models import AnyModel
from fedtailor.core.method import Method
from fedtailor.core.untrusted_input import check_settings, read_toml
from fedtailor.data.dataset import Data
from fedtailor.data.datasets import DATASETS
from fedtailor.data.federation import Federation
from fedtailor.experiments.client_networks import ClientNetworks, build_networks
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent
from fedtailor.experiments.own_parts import OwnData, OwnNetwork, build_data, make_model
from fedtailor.experiments.parsing import NestedSettings, build_dataclass, build_named
from fedtailor.methods import METHODS, FedAvg
from fedtailor.networks import multimodal_networks, network
from fedtailor.networks.layers import Network
from fedtailor.runs.records import Record
from fedtailor.runs.run import Run
from fedtailor.training.attacks import ATTACKS
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import check_fit, describe_run, train


@dataclass(frozen=True)
class Experiment(TrainingConfig):
    """All settings of a run."""

    method: Method = field(default_factory=FedAvg)
    data: Data | OwnData = field(default_factory=DATASETS["digits"])
    network: Annotated[Network | OwnNetwork | ClientNetworks | None, "None: the data set's default"] = None

    def load(self) -> Federation:
        """Return the federation; the split uses the run's seed unless `data.seed` is set."""
        return (self.data if self.data.seed is not None else replace(self.data, seed=self.seed)).load()

    def run(
        self,
        fed: Federation | None = None,
        on_round_end: Callable[[Record], None] | None = None,
        folder: Path | None = None,
    ) -> Run:
        """Train and return the run."""
        fed = fed or self.load()
        return train(self, self.method, self.model(fed), fed, on_round_end, folder)

    def describe(self, fed: Federation) -> dict[str, Any]:
        """Return the settings that are saved in the run folder."""
        return describe_run(self, self.method, self.model(fed), fed)

    def check(self, fed: Federation) -> None:
        """Raise an error if the settings do not fit together, without training."""
        check_fit(self, self.method, self.model(fed), fed)

    def model(self, fed: Federation) -> AnyModel:
        """Return the network for a federation, or the networks of its clients."""
        if self.network is None:
            usual = self.data.network if isinstance(self.data, Data) else None
            return network(usual or _default_network(fed), fed)
        return self.network.model(fed) if isinstance(self.network, ClientNetworks) else make_model(self.network, fed)


def read_experiment_file(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file."""
    return read_toml(path, "The experiment")


def make_experiment(settings: NestedSettings, consent: CodeConsent = NO_CONSENT) -> Experiment:
    """Return an experiment from nested settings, as in a TOML file. Own code that they name is imported only with the
    user's consent.

    >>> make_experiment({"rounds": 5, "method": {"name": "ditto", "lam": 0.5}}).method.lam
    0.5
    """
    check_settings(settings, "The experiment")
    rest = dict(settings)
    parts = {"method": build_named("method", rest.pop("method", {}), METHODS, "fedavg", consent)}
    parts |= {"attack": build_named("attack", _or_none(rest.pop("attack", {})), ATTACKS, None)}
    parts |= {"network": build_networks(rest.pop("network", {}), consent)}
    parts |= {"data": build_data(rest.pop("data", {}), consent)}
    experiment: Experiment = build_dataclass(Experiment, rest | parts, "the experiment")
    return experiment


def _or_none(attack: Any) -> Any:
    """Return the settings of an attack; a flag or a sweep writes "none" for no attack."""
    name = attack.get("name") if isinstance(attack, Mapping) else attack
    return {} if str(name).lower() == "none" else attack


def _default_network(fed: Federation) -> str:
    if fed.shape is None:
        return next(iter(multimodal_networks(fed)), "mlp")
    return "lenet5" if len(fed.shape) == 3 and min(fed.shape[1:]) >= 28 else "mlp"
