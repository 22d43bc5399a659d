"""A data set for tests of `Federation.from_dataset`."""

from typing import Any

from torch.utils.data import Dataset


class ListDataset(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]
