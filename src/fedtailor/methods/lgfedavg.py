"""LG-FedAvg: a shared head and a personal body."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_weights import ClientWeights
from fedtailor.core.trees import Params
from fedtailor.methods._shared.split import Split, SplitMethod, Splitter


@dataclass(frozen=True)
class LGFedAvg(SplitMethod):
    """Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", arXiv
    2020.

    The head is shared and the body is personal, the opposite of FedPer. All clients start at the same initial model.
    The authors' code starts from a model that was trained with FedAvg (here, pass such initial weights to the
    simulation) and reports the best model that each client has had.
    """

    title: ClassVar[str] = "LG-FedAvg"
    weights: Annotated[ClientWeights, "client weights: uniform (as in the code) or by number of samples"] = "uniform"
    mixed_architectures: ClassVar[bool] = True
    download: ClassVar[str] = "head"
    upload: ClassVar[str] = "head"
    client_state: ClassVar[str] = "body"
    newcomer_start: ClassVar[str] = "the global head; the initial body"

    @property
    def part(self) -> Split:
        return "head"

    def split_params(self, split: Splitter) -> tuple[Params, Params]:
        body, head = split("head")
        return head, body
