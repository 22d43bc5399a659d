"""FedBN: FedAvg with personal batch normalization layers."""

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree
from fedtailor.methods._shared.split import Split, SplitMethod


@dataclass(frozen=True)
class FedBN(SplitMethod):
    """Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

    All batch normalization layers, found by type, are personal, including their running statistics. For a model without
    batch normalization, the method equals FedAvg. The authors' code weights all clients equally, because they have
    equally many samples.
    """

    download: ClassVar[str] = "all but batch normalization"
    upload: ClassVar[str] = "all but batch normalization"
    client_state: ClassVar[str] = "batch normalization"
    newcomer_start: ClassVar[str] = "the global shared part; initial batch normalization"

    @property
    def part(self) -> Split:
        return "batch_norm"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.model.split(setup.params, self.part)[0]}  # the personal part may be empty

    def init_client(self, setup: Setup) -> Tree:
        personal = setup.model.split(setup.params, self.part)[1]
        return {"personal": personal, **self.init_optimizer(setup.params)}
