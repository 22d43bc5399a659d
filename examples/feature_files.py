"""Write crema-d.npz or crisis-mmd.npz, which FedTailor reads, from the publisher's files and the features of images,
videos, and texts that pretrained networks computed; docs/data.md describes these files.

    python examples/feature_files.py crema-d CREMA-D --video video.npz --out data
    python examples/feature_files.py crisis-mmd CrisisMMD_v2.0 --image image.npz --text text.npz --out data
"""

import argparse
from pathlib import Path

import numpy as np

from fedtailor.data.features.crema_d import make_crema_d
from fedtailor.data.features.crisis_mmd import make_crisis_mmd
from fedtailor.data.features.files import CREMA_D, CRISIS_MMD


def main() -> None:
    parser = argparse.ArgumentParser(description="Write crema-d.npz or crisis-mmd.npz for FedTailor.")
    datasets = parser.add_subparsers(dest="dataset", required=True)
    for dataset, features in (("crema-d", ["video"]), ("crisis-mmd", ["image", "text"])):
        command = datasets.add_parser(dataset)
        command.add_argument("folder", type=Path, help="folder of the publisher's files")
        for feature in features:
            command.add_argument(f"--{feature}", type=Path, required=True, help=f".npz file with id and {feature}")
        command.add_argument("--out", type=Path, default=Path(), help="folder of the new file")
    given = parser.parse_args()
    if given.dataset == "crema-d":
        name, arrays = CREMA_D, make_crema_d(given.folder, given.video)
    else:
        name, arrays = CRISIS_MMD, make_crisis_mmd(given.folder, given.image, given.text)
    given.out.mkdir(parents=True, exist_ok=True)
    np.savez(given.out / name, allow_pickle=False, **arrays)
    print(f"Saved {len(arrays['label']):,} samples in {given.out / name}")


if __name__ == "__main__":
    main()
