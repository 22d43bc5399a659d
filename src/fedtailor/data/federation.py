"""`Federation`: clients, each with training and test data.

All samples are in one tensor, and a client is two lists of indices. The data is therefore copied to a device once, and
it keeps its dtype until a batch is made.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.batch import as_parts
from fedtailor.core.metrics import Task
from fedtailor.core.model import Inputs
from fedtailor.data.client_arrays import ClientArrays
from fedtailor.data.client_stream import ClientStream, targets_of
from fedtailor.data.conversion import encode_labels, resolve_targets, to_inputs, to_targets, warn_if_random
from fedtailor.data.normalization import Normalization, input_statistics
from fedtailor.data.samples import (
    COMMON_TEST_SET,
    CommonTest,
    as_pair,
    check_lengths,
    hold_out_tests,
    join_samples,
    take_common,
    with_sample_axis,
)
from fedtailor.data.splits.owners import check_owned, client_names, samples_by_client
from fedtailor.data.splits.resampling import check_repeat, draw_split
from fedtailor.data.stored_samples import StoredSamples, hash_samples, non_finite_samples
from fedtailor.data.survival_targets import invalid_targets, strata_of
from fedtailor.data.tables.table_format import TableFormat
from fedtailor.errors import DataError

OWN_DATA = "own data"  # name of data without settings


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients and their data; `classes` is None if the targets are not classes."""

    x: Inputs
    y: Tensor
    train: tuple[Tensor, ...]  # indices of each client's training samples
    test: tuple[Tensor, ...]  # indices of each client's test samples
    names: tuple[str, ...]
    classes: int | None
    class_names: tuple[str, ...] | None = None  # if the labels were text
    mean: tuple[float, ...] | None = None  # per channel or pixel, subtracted when a batch is made
    std: tuple[float, ...] | None = None  # per channel or pixel, divided by after that
    settings: Mapping[str, Any] = field(default_factory=dict)  # how the federation was made, for the run folder
    common_test: Tensor | None = None  # indices of test samples that belong to no client, for all personal models
    survival: bool = False  # whether targets are (event, time), with event 1 if it was observed and 0 if censored
    stored: StoredSamples | None = None  # what is recorded about x and y if they are from a federation file
    refit: Callable[["Federation"], "Federation"] | None = None  # repeats what `with_preprocessing` did after a resplit
    table: TableFormat | None = None  # how x was computed from the rows of a table, if it was

    def __post_init__(self) -> None:
        _check(self)

    def __repr__(self) -> str:
        parts = as_parts(self.x).items()
        inputs = [f"{name} {'×'.join(map(str, part.shape[1:])) or 'numbers'}".strip() for name, part in parts]
        train, test = (sum(map(len, split)) for split in (self.train, self.test))
        common = "" if self.common_test is None else f", {len(self.common_test):,} common test samples"
        clients = f"{self.num_clients:,} client{'' if self.num_clients == 1 else 's'}"
        targets = "numbers as targets" if self.classes is None else f"{self.classes:,} classes"
        if self.survival:
            targets = f"survival times with {int(self.y[:, 0].sum()):,} events as targets"
        samples = f"{train:,} training and {test:,} test samples"
        return f"Federation({clients}, {samples}{common}, {targets}, inputs {', '.join(inputs)})"

    def _repr_html_(self) -> str:
        from fedtailor.reporting.notebook.federation import federation_html

        return federation_html(self)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    @property
    def task(self) -> Task:
        """What the targets are for: "classification", "regression", or "survival"."""
        return "survival" if self.survival else "regression" if self.classes is None else "classification"

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a network for these targets: the classes, the numbers per sample, or one risk."""
        return self.classes if self.classes is not None else 1 if self.survival else self.y[:1].numel()

    @property
    def strata(self) -> NDArray[Any]:
        """The targets by which splits are stratified: classes, or the events of survival times."""
        return strata_of(self.y, self.survival)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one sample's input; None if inputs have several parts."""
        return None if isinstance(self.x, dict) else tuple(self.x.shape[1:])

    @property
    def is_mapped(self) -> bool:
        """Whether the inputs are in a file that is mapped into memory; they are then read-only."""
        return self.stored is not None and self.stored.x is self.x and self.stored.y is self.y

    def sample_hash(self) -> str:
        """Return the SHA-256 of all samples; that of a federation file was recorded when the file was written."""
        return self.stored.sha256 if self.stored is not None and self.is_mapped else hash_samples(self.x, self.y)

    def class_counts(self, indices: Tensor) -> list[int] | None:
        """Return the number of these samples per class; None if the targets are not classes."""
        return None if self.classes is None else torch.bincount(self.y[indices], minlength=self.classes).tolist()

    def select(self, clients: Sequence[int]) -> "Federation":
        """Return the federation of these clients only, in this order; the common test set stays.

        >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        >>> Federation.from_arrays([(x, y, x, y)] * 3, names=["ann", "bob", "eve"]).select([2, 0]).names
        ('eve', 'ann')
        """
        train, test = (tuple(own[client] for client in clients) for own in (self.train, self.test))
        return replace(self, train=train, test=test, names=tuple(self.names[client] for client in clients))

    def with_normalization(self, kind: Normalization = "channel") -> "Federation":
        """Return the federation with another normalization; a batch then contains (x - mean) / std.

        - `channel`: the mean and standard deviation of each channel over the training samples of all clients.
        - `pixel`: those of each number of an input.
        - `half`: 0.5 and 0.5, so that bytes become numbers from -1 to 1.
        - `none`: inputs are not normalized; bytes become numbers from 0 to 1.

        `channel` and `pixel` are for simulations: they read the data of all clients, also of those that are held out
        later, and the result is the same for all of them. Clients of a real federation cannot compute it without
        sharing statistics of their data; there, use published values.

        >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1])
        >>> Federation.from_arrays([(x, y, x, y), (x + 2, y, x, y)]).with_normalization().mean
        (2.0,)
        """
        settings = {**self.settings, "normalize": kind} if self.settings else {}  # as in `Data`
        if kind == "none":
            return replace(self, mean=None, std=None, settings=settings)
        if isinstance(self.x, dict) or not (self.x.dtype == torch.uint8 or self.x.is_floating_point()):
            raise DataError("with_normalization needs inputs with a single part of bytes or floats; omit it here.")
        if kind == "half":
            return replace(self, mean=(0.5,), std=(0.5,), settings=settings)

        def fit(fed: Federation) -> Federation:
            assert not isinstance(fed.x, dict)
            mean, std = input_statistics(fed.x, torch.cat(fed.train), kind)
            return replace(fed, mean=mean, std=std)

        return replace(self, settings=settings).with_preprocessing(fit)

    def with_preprocessing(self, fit: Callable[["Federation"], "Federation"]) -> "Federation":
        """Return `fit(self)`; `resplit` then calls `fit` again with the new training samples.

        `fit` returns a federation whose inputs are transformed by statistics of its training samples. Preprocessing of
        your own data that is passed here never sees a test sample, however often the samples are split anew.

        >>> x, y = torch.arange(8.0)[:, None], torch.tensor([0, 1] * 4)
        >>> fed = Federation.from_owners(x, y, ["ann"] * 8).with_preprocessing(
        ...     lambda fed: replace(fed, x=fed.x / fed.x[fed.train[0]].max())
        ... )
        >>> [float(new.x[new.train[0]].max()) for new in (fed, fed.resplit(0), fed.resplit(1))]
        [1.0, 1.0, 1.0]
        """

        def refit(new: Federation) -> Federation:
            before = replace(new, x=self.x, mean=self.mean, std=self.std, table=self.table, refit=None)
            return (before if self.refit is None else self.refit(new)).with_preprocessing(fit)

        return replace(fit(self), refit=refit)

    def resplit(self, repeat: int, folds: int | None = None) -> "Federation":
        """Return the federation in which every client's samples are split anew into training and test samples.

        Each `repeat` is another draw, stratified by class, by event, or by quantiles of numeric targets, with as many
        test samples as the client has now. Clients and their samples stay the same, and so does the common test set; a
        publisher's test samples are pooled with the client's training samples. With `folds`, the draws are those of
        cross-validation: `repeat` 0 to folds − 1 test each sample once, the next `folds` numbers are another
        cross-validation, and so on. Statistics of training samples that were used for preprocessing are computed anew.

        >>> fed = Federation.from_owners(torch.zeros(8, 3), [0, 1] * 4, ["ann"] * 8)
        >>> [sorted(fed.y[fed.resplit(repeat).test[0]].tolist()) for repeat in range(3)]  # one of each class
        [[0, 1], [0, 1], [0, 1]]
        """
        check_repeat(repeat, folds)
        train, test, strata = list[Tensor](), list[Tensor](), self.strata
        for client, name in enumerate(self.names):
            own = torch.cat([self.train[client], self.test[client]]).sort().values
            num_test = len(self.test[client])
            if folds is not None and num_test > 0 and len(own) < folds:
                raise DataError(f"Client {name} has {len(own)} samples, too few for {folds} folds; use fewer folds.")
            parts = draw_split(strata[own.numpy()], num_test, repeat, client, folds)
            for found, positions in zip((train, test), parts, strict=True):
                found.append(own[torch.from_numpy(positions)])
        settings = {**(self.settings or {"name": OWN_DATA}), "repeat": repeat, "folds": folds}
        new = replace(self, train=tuple(train), test=tuple(test), settings=settings)
        return new if self.refit is None else self.refit(new)

    def find_owner(self, marked: Tensor) -> str:
        """Return who has the first marked sample, as the start of a sentence; `marked` is a mask over all samples."""
        owned = (torch.cat(pair) for pair in zip(self.train, self.test, strict=True))
        for name, own in zip(self.names, owned, strict=True):
            if bool(marked[own].any()):
                return f"Client {name}"
        is_common = self.common_test is not None and bool(marked[self.common_test].any())
        return COMMON_TEST_SET if is_common else "A sample of another client"

    def make_preprocessing(self, dtype: torch.dtype, device: torch.device) -> Callable[[Inputs], Inputs]:
        """Return the function that converts stored samples to inputs of a model.

        It maps bytes to numbers from 0 to 1, converts floats to the dtype of the run, and leaves other integers
        (tokens, lengths) unchanged. Then it normalizes the channels or pixels by mean and standard deviation.
        """
        max_byte = torch.tensor(255, dtype=dtype, device=device)  # in this dtype, so that the quotient has it as well
        mean = _as_inputs(self.mean, self.shape, dtype, device)
        std = _as_inputs(self.std, self.shape, dtype, device)

        def prepare_part(part: Tensor) -> Tensor:
            if part.dtype == torch.uint8:
                part = part / max_byte
            elif part.is_floating_point():
                part = part.to(dtype)
            part = part if mean is None else part - mean
            return part if std is None else part / std

        return lambda x: {n: prepare_part(p) for n, p in x.items()} if isinstance(x, dict) else prepare_part(x)

    def plot(self) -> Any:
        """Return a plotly figure of how the data are split, which notebooks show: the classes of each client, or the
        clients' sizes if the targets are not classes.

        >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        >>> Federation.from_arrays([(x, y, x, y)]).plot().layout.title.text
        '<b>Classes per client</b>'
        """
        from fedtailor.reporting.plotting import plot_federation  # requires plotly and scipy

        return plot_federation(self)

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
        labels = client_names(names, len(clients))
        for name, arrays in zip(labels, clients, strict=True):
            if len(arrays) != 4:
                raise DataError(f"Client {name} must be (x_train, y_train, x_test, y_test), got {len(arrays)} arrays.")
        common = [] if common_test is None else [tuple(common_test)]
        if any(len(arrays) != 2 for arrays in common):
            raise DataError(f"{COMMON_TEST_SET} must be (x, y), got {len(common[0])} arrays.")
        owners = [f"Client {name}" for name in labels for _ in ("train", "test")] + [COMMON_TEST_SET for _ in common]
        pairs = [pair for arrays in clients for pair in (arrays[:2], arrays[2:])] + common
        xs = [to_inputs(x, f"{owner}'s") for owner, (x, _) in zip(owners, pairs, strict=True)]
        ys, class_names = targets_of([y for _, y in pairs], owners)
        for owner, own_x, own_y in zip(owners, xs, ys, strict=True):
            check_lengths(own_x, own_y, f"{owner}'s")
        x = join_samples(xs, owners, "inputs")
        extra = {"class_names": class_names, "survival": survival} | extra
        extra |= {"mean": _as_floats(mean), "std": _as_floats(std)}
        return cls._from_blocks(x, ys, owners, labels, classes, regression, extra)

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
        (encoded,), class_names = encode_labels([y], ["?"])
        x, y = to_inputs(x, "The"), to_targets(encoded, "The")
        check_lengths(x, y, "The")
        known, owned = samples_by_client(owners, len(y))
        labels = client_names(known if names is None else names, len(owned))
        check_owned(owned, labels, len(y))
        strata = strata_of(y, survival)
        owned, common = take_common(strata, owned, common_test, seed)
        parts = hold_out_tests(strata, owned, test, seed)
        train, held = (tuple(torch.from_numpy(part[side]) for part in parts) for side in (0, 1))
        extra = {"class_names": class_names, "common_test": common, "survival": survival} | extra
        extra |= {"mean": _as_floats(mean), "std": _as_floats(std)}
        return cls._build(x, y, train, held, labels, classes, regression, extra)

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
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(
                "The data set must have a length and indexed samples; read an iterable data set into arrays first."
            )
        known, owned = samples_by_client(owners, len(dataset))
        names = known if names is None else names
        owner_of = {int(sample): name for name, own in zip(names, owned, strict=True) for sample in own}
        clients = [f"Client {owner_of.get(sample, '?')}" for sample in range(len(dataset))]
        pairs = [as_pair(dataset[sample], client) for sample, client in enumerate(clients)]
        inputs = [to_inputs(x, f"{client}'s") for (x, _), client in zip(pairs, clients, strict=True)]
        warn_if_random(dataset, inputs)
        encoded, class_names = encode_labels([y for _, y in pairs], clients)
        targets = [to_targets(y, f"{client}'s") for y, client in zip(encoded, clients, strict=True)]
        x = join_samples([with_sample_axis(part) for part in inputs], clients, "inputs")
        y = join_samples([target[None] for target in targets], clients, "targets")
        return cls.from_owners(
            x, y, owned, names=names, test=test, seed=seed, classes=classes, regression=regression,
            common_test=common_test, class_names=class_names,
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
        settings = {"name": "folder", "folder": str(folder), "test": test, "seed": seed}
        settings |= {n: v for n, v in {"classes": classes, "regression": regression}.items() if v is not None}
        settings |= {"survival": True} if survival else {}
        options = {"classes": classes, "regression": regression, "survival": survival, "settings": settings}
        return cls._from_client_arrays(found, **options)

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
        return cls._from_table(found, {"name": "tables", **source, **vars(settings), "seed": seed})

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
        return cls._from_table(found, {"name": "data frame", "client": client, **vars(settings), "seed": seed})

    @classmethod
    def _from_table(cls, found: Mapping[str, Any], settings: Mapping[str, Any]) -> "Federation":
        train, test = (tuple(torch.from_numpy(own) for own in found[part]) for part in ("train", "test"))
        x, y = torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
        rest = {name: found[name] for name in ("names", "classes", "class_names", "survival", "table", "refit")}
        return cls(x, y, train, test, **rest, settings=settings)

    @classmethod
    def from_pfllib(cls, folder: str | Path) -> "Federation":
        """Read a data set that PFLlib generated, with its clients and their training and test data; see
        `fedtailor.data.user_files.pfllib`."""
        from fedtailor.data.user_files.pfllib import read_pfllib

        found, classes = read_pfllib(Path(folder))
        return cls._from_client_arrays(found, classes=classes, settings={"name": "pfllib", "folder": str(folder)})

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

        found = read_huggingface(dataset, client, x, y, test, seed)
        labels = client_names(found.names if names is None else names, len(found.names))
        extra = {"class_names": found.class_names}
        return cls._build(found.x, found.y, found.train, found.test, labels, classes, regression, extra)

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

        def finish(x: Inputs) -> dict[str, Any]:
            ys, class_names = targets_of(stream.targets, stream.owners)
            labels, options = client_names(stream.names, len(stream.names)), {"class_names": class_names} | extra
            return _fields(cls._from_blocks(x, ys, stream.owners, labels, classes, regression, options))

        write_federation(Path(path), stream.inputs(), finish)
        return cls.from_file(path)

    def save(self, path: str | Path) -> None:
        """Write the federation to one file, which `from_file` opens; an existing file is replaced.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        ...     Federation.from_arrays([(x, y, x, y)]).save(f"{folder}/fed.safetensors")
        """
        from fedtailor.data.federation_writer import write_federation

        write_federation(Path(path), [("The federation", self.x)], lambda x: _fields(self) | {"x": x})

    @classmethod
    def _from_client_arrays(cls, found: ClientArrays, **options: Any) -> "Federation":
        if found.class_names is not None:
            options["class_names"] = found.class_names
        return cls.from_arrays(found.clients, names=found.names, **options)

    @classmethod
    def _from_blocks(
        cls,
        x: Inputs,
        ys: Sequence[Tensor],
        owners: Sequence[str],
        names: tuple[str, ...],
        classes: int | None,
        regression: bool | None,
        extra: dict[str, Any],
    ) -> "Federation":
        """Make a federation from samples in the order train, test, train, test, ..., and the common test set."""
        y = join_samples(ys, owners, "targets")
        indices = torch.split(torch.arange(len(y)), [len(part) for part in ys])
        train, test = indices[: 2 * len(names) : 2], indices[1 : 2 * len(names) : 2]
        common = indices[-1] if len(indices) > 2 * len(names) else None
        return cls._build(x, y, train, test, names, classes, regression, {"common_test": common} | extra)

    @classmethod
    def _build(
        cls,
        x: Inputs,
        y: Tensor,
        train: Sequence[Tensor],
        test: Sequence[Tensor],
        names: tuple[str, ...],
        classes: int | None,
        regression: bool | None,
        extra: dict[str, Any],
    ) -> "Federation":
        """Make a federation after deciding whether its targets are classes."""
        owned = torch.zeros(len(y), dtype=torch.bool)
        owned[torch.cat([*train, *test, *_list(extra.get("common_test"))])] = True
        if classes is None and extra["class_names"] is not None:
            classes = len(extra["class_names"])
        if extra.get("survival"):
            y, regression = y if y.is_floating_point() else y.double(), True
        y, classes = resolve_targets(y, owned, classes, regression)
        return cls(x, y, tuple(train), tuple(test), names, classes, **extra)


def _fields(fed: Federation) -> dict[str, Any]:
    return {f.name: getattr(fed, f.name) for f in fields(fed)}


def _as_floats(values: Sequence[float] | None) -> tuple[float, ...] | None:
    try:
        return None if values is None else tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise DataError(f"mean and std must be lists of numbers, one per channel, got {values!r}.") from error


def _list(common_test: Tensor | None) -> list[Tensor]:
    return [] if common_test is None else [common_test]


def _as_inputs(
    values: tuple[float, ...] | None, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return numbers per channel or per pixel as a tensor that can be combined with inputs."""
    if values is None or shape is None:
        return None
    is_per_pixel = len(values) > 1 and len(values) == prod(shape)
    return torch.tensor(values, dtype=dtype, device=device).reshape(
        shape if is_per_pixel else (-1, *[1] * (len(shape) - 1))
    )


def _check_normalization(fed: Federation) -> None:
    for values in (fed.mean, fed.std):
        if values is not None and (fed.shape is None or len(values) not in {1, *fed.shape[:1], prod(fed.shape)}):
            expected = "one value per channel or per pixel, for inputs with a single part"
            raise DataError(f"mean and std need {expected}, got {len(values)} values.")
    if not all(map(isfinite, fed.mean or ())) or not all(0 < value < inf for value in fed.std or ()):
        got = f"{reprlib.repr(fed.mean)} and {reprlib.repr(fed.std)}"
        raise DataError(f"mean must be finite, and std finite and above 0, got {got}.")


def _check(fed: Federation) -> None:
    _check_normalization(fed)
    if fed.class_names is not None and len(fed.class_names) != fed.classes:
        raise DataError(f"There are {len(fed.class_names)} names of classes, but classes is {fed.classes}.")
    for name, own in zip(fed.names, fed.train, strict=True):
        if not len(own):
            raise DataError(f"Client {name} has no training data; add some or remove the client.")
    owned = torch.zeros(len(fed.y), dtype=torch.bool)
    owned[torch.cat(fed.train + fed.test)] = True
    for common in _list(fed.common_test):
        if not len(common) or bool(owned[common].any()):
            problem = "contains samples of a client" if len(common) else "has no samples"
            raise DataError(f"{COMMON_TEST_SET} {problem}; give it samples that belong to no client.")
        owned[common] = True
    is_known_finite = fed.stored is not None and fed.is_mapped and fed.stored.is_finite
    inputs = [] if is_known_finite else list(as_parts(fed.x).values())
    for kind, part in [*(("inputs", part) for part in inputs), ("targets", fed.y)]:
        bad = owned & non_finite_samples(part)
        if bool(bad.any()):
            raise DataError(f"{fed.find_owner(bad)} has NaN or infinity in its {kind}; remove those samples.")
    if fed.survival:
        bad = owned & invalid_targets(fed.y)
        if bool(bad.any()):
            expected = "pairs (event, time) with event 0 or 1 and a time of at least 0"
            raise DataError(f"{fed.find_owner(bad)} has invalid survival targets; they must be {expected}.")
    if fed.classes is not None:
        bad = owned & ((fed.y < 0) | (fed.y >= fed.classes))
        if bool(bad.any()):
            first = bad & (bad.cumsum(0) == 1)  # so that the label is the one of this client
            label = int(fed.y[first])
            raise DataError(
                f"{fed.find_owner(first)} has the label {label}; labels must be from 0 to {fed.classes - 1}."
            )
