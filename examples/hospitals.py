"""Should these four hospitals federate? From one CSV file per hospital to the answer.

python examples/hospitals.py             # writes the hospitals of `heart` as CSV files first
python examples/hospitals.py my_sites    # one CSV file per hospital, with the same columns
"""

import sys
import tempfile
from pathlib import Path

import pandas as pd

import fedtailor as ft
from fedtailor.data.clinical.heart import SHIPPED


def write_hospitals(folder: Path) -> None:
    """Write one file per hospital: age, sex, chest pain (cp), cholesterol (chol), ..., and whether there is disease."""
    patients = pd.read_csv(SHIPPED).drop(columns="flamby")
    patients["disease"] = patients.pop("num").gt(0).map({True: "yes", False: "no"})
    for hospital, own in patients.groupby("hospital"):
        own.drop(columns="hospital").to_csv(folder / f"{hospital}.csv", index=False)


def answer(folder: Path, repeats: int = 4) -> ft.ComparisonResult:
    """Compare one model for all, shared weights with own intercepts, and personal models with local training."""
    fed = ft.Federation.from_tables(
        folder,
        target="disease",
        categories=["cp", "restecg"],  # codes, not amounts
        fit="site",  # each hospital standardizes by its own patients
        min_count=1,  # all rows are on this machine, so rare categories need not be hidden
    )
    model = ft.network("logistic", fed, intercept_head=True)
    methods = [ft.methods.FedAvg(), ft.methods.FedRep(), ft.methods.Ditto()]
    return ft.compare(
        methods,
        model,
        fed,
        folds=5,
        repeats=repeats,
        rounds=20,
        batch_size=16,
        evaluate_every=20,
        metrics=["auc", "accuracy"],
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        result = answer(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            write_hospitals(Path(temporary))
            result = answer(Path(temporary))
    print(result.table())
    print(result.verdict())
