"""Data sets of patients, whose clients are hospitals or regions."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from fedtailor.data.clinical.heart import TABLE, read_shipped, read_uci_heart
from fedtailor.data.clinical.tcga_brca import PATIENTS, SPLIT, read_tcga_brca
from fedtailor.data.dataset import OwnedData
from fedtailor.data.federation import Federation
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.standardization import standardize_by_client
from fedtailor.data.tables.table_format import TableFormat


@dataclass(frozen=True, kw_only=True)
class ClinicalData(OwnedData):
    """Patients of several sites. Each site standardizes its features by its own training samples."""

    table: ClassVar[TableFormat | None] = None  # how the original columns become features, if models take them

    standardize: Annotated[
        bool, "shift and scale each feature of each client to mean 0 and deviation 1 of its training samples"
    ] = True

    def make_federation(self) -> Federation:
        fed = super().make_federation()
        return standardize_by_client(replace(fed, table=self.table)) if self.standardize else fed


@dataclass(frozen=True, kw_only=True)
class Heart(ClinicalData):
    """Heart disease or none, of the patients of four hospitals in 1988; shipped with the package.

    The 13 features of each client are standardized by the mean and standard deviation of its own training samples.
    """

    name: ClassVar[str] = "heart"
    network: ClassVar[str | None] = "logistic"
    samples: ClassVar[str] = "740"
    owners: ClassVar[str] = "4 hospitals"
    publisher: ClassVar[str] = (
        "Janosi, Steinbrunn, Pfisterer, Detrano: Heart Disease, UCI Machine Learning Repository 45 (shipped)"
    )
    license: ClassVar[str] = "CC BY 4.0"
    table: ClassVar[TableFormat | None] = TABLE

    folder: Annotated[str | None, "folder with the publisher's files; default: the copy in the package"] = None
    test: Annotated[
        float | Literal["publisher"],
        "fraction of each client's samples that is held out for testing; publisher: FLamby's test set",
    ] = 0.34

    def read(self) -> SampleTable:
        return read_shipped() if self.folder is None else read_uci_heart(Path(self.folder).expanduser())

    def download(self) -> Path | None:
        return None

    @property
    def is_available(self) -> bool | None:
        return True


@dataclass(frozen=True, kw_only=True)
class TCGABRCA(ClinicalData):
    """Survival of breast cancer patients of six regions; a target is whether and when a patient died.

    The 39 covariates of each client are standardized by the mean and standard deviation of its own training samples.
    """

    name: ClassVar[str] = "tcga-brca"
    network: ClassVar[str | None] = "logistic"
    samples: ClassVar[str] = "1,088"
    owners: ClassVar[str] = "6 regions"
    publisher: ClassVar[str] = "https://github.com/owkin/FLamby (flamby/datasets/fed_tcga_brca)"
    license: ClassVar[str] = "open clinical data of TCGA (NCI's Genomic Data Commons); files of FLamby: MIT"

    folder: Annotated[str | None, f"folder with FLamby's {PATIENTS} and {SPLIT}"] = None
    test: Annotated[
        float | Literal["publisher"],
        "fraction of each client's samples that is held out for testing; publisher: FLamby's test set",
    ] = 0.2

    @property
    def how_to_get(self) -> str:
        return f"get {PATIENTS} and {SPLIT} from {self.publisher}"

    def read_folder(self, folder: Path) -> SampleTable:
        return read_tcga_brca(folder)
