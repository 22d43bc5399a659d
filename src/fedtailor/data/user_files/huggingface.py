"""Reader of Hugging Face `datasets`: samples with a column that names their client, or one partition per client.

Images become bytes of shape (channels, height, width), and other columns keep their dtype. Nothing is downloaded here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.model import Inputs
from fedtailor.data.client_samples import ClientSamples, SampleOwners
from fedtailor.data.conversion import encode_labels, to_inputs, to_targets
from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.owners import client_names, group_by_owner
from fedtailor.data.splits.partition import hold_out
from fedtailor.errors import ConfigError, DataError

try:
    import datasets
except ImportError as error:
    raise ConfigError("Hugging Face data needs: pip install 'fedtailor[huggingface]'.") from error

X = str | Sequence[str] | Mapping[str, str] | None  # one column, several numeric columns, or the parts of the inputs
_MAX_LISTED = 20  # columns in an error message


@dataclass(frozen=True)
class _Clients:
    """The clients as rows of several data sets, which are numbered as if they were concatenated."""

    sources: Sequence[datasets.Dataset]
    names: Sequence[str]
    train: Sequence[Indices]
    test: Sequence[Indices] | None  # None: to be held out


def read_huggingface(
    dataset: Any, client: str | None, x: X, y: str | None, names: Sequence[str] | None, test: float, seed: int
) -> ClientSamples:
    """Read all samples; `Federation.from_huggingface` explains the arguments."""
    if not 0 < test < 1:
        raise DataError(f"test must be a fraction between 0 and 1, got {test}.")
    found = _find_clients(dataset, client)
    sources = [source for source in found.sources if len(source)]
    if not sources:
        raise DataError("The data set has no samples, so there are no clients.")
    _check_sources(sources)
    x, y = _choose_columns(sources[0], client, x, y)
    targets, class_names = _read_targets(sources, y)
    inputs = _read_inputs(sources, x)
    train, held = found.train, found.test
    if held is None:
        pairs = [hold_out(targets.numpy(), own, test, (seed, number)) for number, own in enumerate(found.train)]
        train, held = [kept for kept, _ in pairs], [out for _, out in pairs]
    in_train, in_test = ([torch.from_numpy(own) for own in part] for part in (train, held))
    labels = client_names(found.names if names is None else names, len(found.names))
    return ClientSamples(inputs, targets, SampleOwners(labels, in_train, in_test), class_names)


def _find_clients(dataset: Any, client: str | None) -> _Clients:
    if isinstance(dataset, datasets.Dataset | datasets.DatasetDict):
        sources = _train_and_test(dataset) if isinstance(dataset, datasets.DatasetDict) else [dataset]
        if client is None:
            raise DataError(f"Pass client=, the column that names each sample's client; {_columns(sources[0])}.")
        owners = [owner for source in sources for owner in _values(source, client)]
        names, owned = group_by_owner(owners)
        if len(sources) == 1:
            return _Clients(sources, names, owned, None)
        cut = len(sources[0])
        return _Clients(sources, names, [own[own < cut] for own in owned], [own[own >= cut] for own in owned])
    if isinstance(dataset, Sequence | Mapping) and not isinstance(dataset, str):
        if client is not None:
            raise DataError(f"Each partition is a client, so client='{client}' does not apply; remove it.")
        return _find_partitions(dataset)
    kinds = "a datasets.Dataset, a DatasetDict, or one of them per client"
    raise DataError(f"dataset must be {kinds}, got {type(dataset).__name__}; a streamed data set must be loaded first.")


def _find_partitions(dataset: Sequence[Any] | Mapping[Any, Any]) -> _Clients:
    named = dict(dataset) if isinstance(dataset, Mapping) else dict(enumerate(dataset))
    is_split = all(isinstance(partition, datasets.DatasetDict) for partition in named.values())
    if not named or not (is_split or all(isinstance(partition, datasets.Dataset) for partition in named.values())):
        found = ", ".join(sorted({type(partition).__name__ for partition in named.values()})) or "none"
        raise DataError(f"The partitions must all be a datasets.Dataset or all a DatasetDict, got {found}.")
    sources = [part for item in named.values() for part in (_train_and_test(item) if is_split else [item])]
    ends = np.cumsum([len(source) for source in sources])
    rows = [np.arange(end - len(source), end) for source, end in zip(sources, ends, strict=True)]
    train, test = (rows[::2], rows[1::2]) if is_split else (rows, None)
    return _Clients(sources, [str(name) for name in named], train, test)


def _train_and_test(splits: datasets.DatasetDict) -> list[datasets.Dataset]:
    if set(splits) != {"train", "test"}:
        fix = "pass datasets.DatasetDict(train=..., test=...), or one of the splits"
        raise DataError(f"The splits must be train and test, got {', '.join(map(str, splits)) or 'none'}; {fix}.")
    return [splits["train"], splits["test"]]


def _check_sources(sources: Sequence[datasets.Dataset]) -> None:
    for source in sources:
        if source.format["type"] == "custom":
            raise DataError("The data set has a transform that is applied on access; apply it with dataset.map first.")
        if source.features != sources[0].features:
            kinds = " and ".join(str(part.features)[:200] for part in (sources[0], source))
            raise DataError(f"All splits and partitions must have the same columns, got {kinds}.")


def _choose_columns(source: datasets.Dataset, client: str | None, x: X, y: str | None) -> tuple[X, str]:
    """Return the columns of inputs and targets; raise `DataError` if they are not given and not clear."""
    features = {name: feature for name, feature in source.features.items() if name != client}
    if y is None:
        used = [x] if isinstance(x, str) else list((x.values() if isinstance(x, Mapping) else x) or [])
        labels = [n for n, f in features.items() if isinstance(f, datasets.ClassLabel) and n not in used]
        y = labels[0] if len(labels) == 1 else "label" if "label" in features and "label" not in used else None
    if x is None and y is not None:
        rest = [name for name in features if name != y]
        images = [name for name in rest if isinstance(features[name], datasets.Image)]
        x = next((names[0] for names in (images, rest) if len(names) == 1), None)
    if x is None or y is None:
        raise DataError(f"Pass x= and y=, the columns of inputs and targets; {_columns(source)}.")
    return x, y


def _columns(source: datasets.Dataset) -> str:
    return f"the columns are {', '.join(source.column_names[:_MAX_LISTED])}"


def _feature(source: datasets.Dataset, name: str) -> Any:
    if name not in source.features:
        raise DataError(f"There is no column '{name}'; {_columns(source)}.")
    return source.features[name]


def _read_targets(sources: Sequence[datasets.Dataset], name: str) -> tuple[Tensor, tuple[str, ...] | None]:
    feature = _feature(sources[0], name)
    if _is_text(feature):
        (labels,), class_names = encode_labels([[v for source in sources for v in _values(source, name)]], ["?"])
        return to_targets(labels, "The"), class_names
    names = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    return to_targets(_read_numbers(sources, name), "The"), names


def _read_inputs(sources: Sequence[datasets.Dataset], x: X) -> Inputs:
    if isinstance(x, str):
        return _read_part(sources, x)
    if isinstance(x, Mapping):
        return {str(part): _read_part(sources, name) for part, name in x.items()}
    columns = [_read_numbers(sources, name) for name in x or ()]
    for name, values in zip(x or (), columns, strict=True):
        if values.ndim != 1:
            raise DataError(f"The column '{name}' has more than one number per sample; pass it alone, or x as a dict.")
    if not columns:
        raise DataError("x must name at least one column.")
    return torch.from_numpy(np.stack(columns, 1).astype(np.result_type(np.float32, *columns)))


def _read_part(sources: Sequence[datasets.Dataset], name: str) -> Tensor:
    if not isinstance(_feature(sources[0], name), datasets.Image):
        return torch.from_numpy(np.require(_read_numbers(sources, name), requirements="W"))
    images: list[Any] = []
    for source in sources:
        for row in source.select_columns([name]).cast_column(name, datasets.Image()).with_format(None):
            if row[name] is None:
                raise DataError(f"Sample {len(images)} has no image in the column '{name}'; remove such samples.")
            images.append(to_inputs(row[name], "The"))
            if images[-1].shape != images[0].shape:
                shapes = f"{tuple(images[-1].shape)}, but the first one has {tuple(images[0].shape)}"
                raise DataError(f"Image {len(images) - 1} in the column '{name}' has the shape {shapes}; resize them.")
    return torch.stack(images)


def _read_numbers(sources: Sequence[datasets.Dataset], name: str) -> NDArray[Any]:
    feature = _feature(sources[0], name)
    if _is_text(feature):
        fix = "tokenize it with dataset.map, and pass the column of tokens as x="
        raise DataError(f"The column '{name}' contains text; {fix}.")
    dtype = _number_type(feature, name)
    parts = []
    for source in sources:
        own = source.select_columns([name])
        if own.with_format("arrow")[:][name].null_count:
            raise DataError(f"The column '{name}' has missing values; remove or fill them.")
        parts.append(own.with_format("numpy", dtype=dtype)[:][name])
    if any(part.dtype == object or part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise DataError(f"The rows of the column '{name}' differ in length; pad them to one length.")
    return np.concatenate(parts)


def _number_type(feature: Any, name: str) -> np.dtype[Any]:
    """Return the dtype of the numbers in a column, also of those in lists; the formatter would convert them."""
    while (inner := feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)) is not None:
        feature = inner
    try:
        return np.dtype(str(feature.dtype))
    except (AttributeError, TypeError) as error:
        raise DataError(f"The column '{name}' must contain numbers or images, got {feature}.") from error


def _is_text(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _values(source: datasets.Dataset, name: str) -> list[Any]:
    _feature(source, name)
    return list(source.select_columns([name]).with_format(None)[:][name])
