"""`Federation`: clients, each with training and test data, and how it is made from arrays, files, and tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtailor.data.client_arrays import join_arrays
from fedtailor.data.client_stream import ClientStream
from fedtailor.data.federation_data import FederationData
from fedtailor.data.normalization import to_statistics
from fedtailor.data.owned_samples import CommonTest, split_by_owner
from fedtailor.data.splits.owners import client_names
from fedtailor.data.torch_dataset import read_dataset


@dataclass(frozen=True, eq=False, repr=False)
class Federation(FederationData):
    """Clients and their data; `classes` is None if the targets are not classes.

    `FederationData` has the fields, and the methods that return another federation.
    """

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[tuple[Any, Any, Any, Any]],
        *,
        names: Sequence[str] | None = None,
        classes: int | None = None,
        regression: bool | None = None,
        survival: bool = False,
        common_test: tuple[Any, Any] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **extra: Any,
    ) -> "Federation":
        """Make a federation from one (x_train, y_train, x_test, y_test) per client, as NumPy arrays or tensors.

        x may be a dict of arrays. Inputs of dtype uint8 are scaled to numbers from 0 to 1. A client without test data
        is trained but not tested. `common_test` contains inputs and targets of samples that belong to no client; all
        personal models are also tested on them.

        Integer targets are classes, numbered from 0, and text targets are the names of classes. Float targets are for
        regression; `regression` says so if they could also be class numbers. With `survival`, each target is a pair
        (event, time): 1 and the time of the event, or 0 and the time after which nothing is known. `classes` is the
        number of classes if some have no samples. `mean` and `std`, with one number per channel or per pixel, normalize
        the inputs; `with_normalization` computes them.

        >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        >>> Federation.from_arrays([(x, y, x, y)]).num_clients
        1
        """
        samples = join_arrays(clients, names, common_test)
        extra |= {"survival": survival, "mean": to_statistics(mean), "std": to_statistics(std)}
        return cls(**samples.resolve(classes, regression, extra))

    @classmethod
    def from_owners(
        cls,
        x: Any,
        y: Any,
        owners: Sequence[Any],
        *,
        names: Sequence[str] | None = None,
        test: float | Sequence[bool] = 0.25,
        seed: int = 0,
        classes: int | None = None,
        regression: bool | None = None,
        survival: bool = False,
        common_test: CommonTest = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **extra: Any,
    ) -> "Federation":
        """Make a federation from samples and their owners; the fraction `test` of each client is held out for testing.

        `owners` has either one owner per sample, or one list of sample indices per client. `test` can also be one
        boolean per sample: whether it is a test sample of its owner. `common_test` is a test set that is common to all
        clients: a fraction of all samples, drawn with the same proportions of classes, or a list of sample indices; the
        owners lose these samples. `from_arrays` explains `classes`, `regression`, `survival`, `mean`, and `std`.

        >>> Federation.from_owners(torch.zeros(4, 3), [0, 1, 0, 1], ["ann", "ann", "bob", "bob"]).names
        ('ann', 'bob')
        """
        samples = split_by_owner(x, y, owners, names, test, seed, survival, common_test)
        extra |= {"survival": survival, "mean": to_statistics(mean), "std": to_statistics(std)}
        return cls(**samples.resolve(classes, regression, extra))

    @classmethod
    def from_dataset(
        cls,
        dataset: torch.utils.data.Dataset[Any],
        owners: Sequence[Any],
        *,
        names: Sequence[str] | None = None,
        test: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
        regression: bool | None = None,
        common_test: CommonTest = None,
    ) -> "Federation":
        """Make a federation from a torch Dataset of (x, y) and the owners of its samples, as in `from_owners`.

        Every sample is read once. x may be a PIL image.

        >>> data = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> Federation.from_dataset(data, ["ann", "ann", "bob", "bob"]).names
        ('ann', 'bob')
        """
        return cls.from_owners(
            **read_dataset(dataset, owners, names), test=test, seed=seed, classes=classes, regression=regression,
            common_test=common_test,
        )  # fmt: skip

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        test: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
        regression: bool | None = None,
        survival: bool = False,
    ) -> "Federation":
        """Read one .npz file or one folder of images per client; see `fedtailor.data.user_files.client_folders`."""
        from fedtailor.data.user_files.client_folders import read_folder  # requires pillow

        found = read_folder(Path(folder), test=test, seed=seed, survival=survival)
        given = {"classes": classes, "regression": regression, "survival": survival or None}
        settings = {"name": "folder", "folder": str(folder), "test": test, "seed": seed}
        settings |= {name: value for name, value in given.items() if value is not None}
        return cls.from_arrays(
            found.clients, **found.options, classes=classes, regression=regression, survival=survival, settings=settings
        )

    @classmethod
    def from_tables(
        cls,
        files: Mapping[str, str | Path] | str | Path,
        *,
        target: str | Sequence[str] | None = None,
        client: str | None = None,
        schema: str | Path | None = None,
        test: float | str = 0.25,
        fit: str = "federation",
        ignore: Sequence[str] = (),
        seed: int = 0,
        **options: Any,
    ) -> "Federation":
        """Read one table per client, .csv or .parquet: files by client, a folder of files, or one file with a column
        `client`. The sites agree on a schema from summaries without rows; see docs/tables.md.

        `target` is a column of classes (text, booleans, integers) or of numbers to predict; several columns are numbers
        that belong together, with `survival=True` an event and its time. `test` is a fraction, or a column with "train"
        or "test".
        Imputation and standardization are fitted on the training rows of all sites, from their sums, or with
        `fit="site"` of each site alone; `fed.table` contains them. `ignore` names columns that are not used. More
        options: the fields of `fedtailor.data.tables.settings.TableSettings`. With `schema`, the file on which the
        sites agreed before, it sets the target, the split, and the features.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for site in ("a", "b"):
        ...         rows = "".join(f"{40 + i},{'yes' if i % 2 else 'no'}\\n" for i in range(20))
        ...         _ = Path(folder, f"{site}.csv").write_text("age,outcome\\n" + rows)
        ...     fed = Federation.from_tables(folder, target="outcome")
        >>> fed.names, fed.class_names, fed.table.feature_names
        (('a', 'b'), ('no', 'yes'), ['age'])
        """
        from fedtailor.data.tables.loading import describe_source, load_tables, make_settings, read_sites

        settings = make_settings(target=target, test=test, fit=fit, ignore=ignore, **options)
        found = load_tables(read_sites(files, client), settings, seed, schema)
        source = describe_source(files, client, schema)
        return cls(**found, settings={"name": "tables", **source, **vars(settings), "seed": seed})

    @classmethod
    def from_dataframe(
        cls, frame: Any, *, client: str, target: str | Sequence[str], seed: int = 0, **options: Any
    ) -> "Federation":
        """Make a federation from a pandas DataFrame; the column `client` names the client of each row.

        The other arguments are those of `from_tables`.

        >>> import pandas as pd
        >>> frame = pd.DataFrame({"site": ["a", "b"] * 20, "age": range(40), "ill": [True, False, False, True] * 10})
        >>> Federation.from_dataframe(frame, client="site", target="ill")
        Federation(2 clients, 30 training and 10 test samples, 2 classes, inputs 1)
        """
        from fedtailor.data.tables.loading import load_frame, make_settings  # require pandas on use

        settings = make_settings(target=target, **options)
        found = load_frame(frame, client, settings, seed)
        return cls(**found, settings={"name": "data frame", "client": client, **vars(settings), "seed": seed})

    @classmethod
    def from_pfllib(cls, folder: str | Path) -> "Federation":
        """Read a data set that PFLlib generated, with its clients and their training and test data; see
        `fedtailor.data.user_files.pfllib`."""
        from fedtailor.data.user_files.pfllib import read_pfllib

        found, classes = read_pfllib(Path(folder))
        settings = {"name": "pfllib", "folder": str(folder)}
        return cls.from_arrays(found.clients, **found.options, classes=classes, settings=settings)

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        *,
        client: str | None = None,
        x: str | Sequence[str] | Mapping[str, str] | None = None,
        y: str | None = None,
        names: Sequence[str] | None = None,
        test: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
        regression: bool | None = None,
    ) -> "Federation":
        """Make a federation from Hugging Face `datasets`: pip install 'fedtailor[huggingface]'.

        `dataset` is a `Dataset` with a column that names the client of each sample; a `DatasetDict` of the splits train
        and test with this column; or one partition per client, as Flower Datasets makes them, in a list or a dict by
        name: a `Dataset`, or a `DatasetDict` of train and test. Without a test split, the fraction `test` of each
        client is held out.

        `client`, `x`, and `y` are names of columns; x and y may be omitted if they are clear from the columns. A list
        of numeric columns as x gives one vector per sample, and a dict gives inputs with several parts.

        >>> import datasets
        >>> data = datasets.Dataset.from_dict({"who": ["ann", "bob"] * 4, "x": [[0.5, 1.0]] * 8, "label": [0, 1] * 4})
        >>> Federation.from_huggingface(data, client="who").names
        ('ann', 'bob')
        """
        from fedtailor.data.user_files.huggingface import read_huggingface

        samples = read_huggingface(dataset, client, x, y, names, test, seed)
        return cls(**samples.resolve(classes, regression, {}))

    @classmethod
    def from_file(cls, path: str | Path, *, verify: bool = False) -> "Federation":
        """Open a file that `save` or `write` wrote; the inputs are mapped into memory and read when they are used.

        A damaged file raises `DataError`. The inputs themselves are compared with their checksum only with `verify`,
        which reads all of them.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        ...     Federation.from_arrays([(x, y, x, y)]).save(f"{folder}/fed.safetensors")
        ...     Federation.from_file(f"{folder}/fed.safetensors").is_mapped
        True
        """
        from fedtailor.data.federation_file import read_federation

        found = read_federation(Path(path), verify)
        client_names(found["names"], len(found["train"]))
        return cls(**found, settings={"name": "file", "file": str(path)})

    @classmethod
    def write(
        cls,
        path: str | Path,
        clients: Iterable[tuple[str, Any, Any, Any, Any]],
        *,
        classes: int | None = None,
        regression: bool | None = None,
        common_test: tuple[Any, Any] | None = None,
        **extra: Any,
    ) -> "Federation":
        """Write a file client by client, for data larger than memory, and return the federation that `from_file` opens.

        `clients` yields (name, x_train, y_train, x_test, y_test) for one client after another, and only the targets
        of all clients are kept in memory. The other arguments are those of `from_arrays`.

        >>> import tempfile
        >>> def clients():
        ...     for name in ("ann", "bob"):
        ...         x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])  # read this client's samples here
        ...         yield name, x, y, x, y
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Federation.write(f"{folder}/fed.safetensors", clients()).names
        ('ann', 'bob')
        """
        from fedtailor.data.federation_writer import write_federation

        stream = ClientStream(clients, common_test)
        write_federation(
            Path(path), stream.inputs(), lambda x: vars(cls(**stream.samples(x).resolve(classes, regression, extra)))
        )
        return cls.from_file(path)

    def save(self, path: str | Path) -> None:
        """Write the federation to one file, which `from_file` opens; an existing file is replaced.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        ...     Federation.from_arrays([(x, y, x, y)]).save(f"{folder}/fed.safetensors")
        """
        from fedtailor.data.federation_writer import write_federation

        write_federation(Path(path), [("The federation", self.x)], lambda x: vars(self) | {"x": x})

    def plot(self) -> Any:
        """Return a plotly figure of how the data are split, which notebooks show: the classes of each client, or the
        clients' sizes if the targets are not classes.

        >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        >>> Federation.from_arrays([(x, y, x, y)]).plot().layout.title.text
        '<b>Classes per client</b>'
        """
        from fedtailor.reporting.plotting import plot_federation  # requires plotly and scipy

        return plot_federation(self)

    def _repr_html_(self) -> str:
        from fedtailor.reporting.notebook.federation import federation_html

        return federation_html(self)
