"""Settings of tables: what each site needs to read its own file, and what all sites agree on."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedtailor.core.fields import PositiveInt, check_fields
from fedtailor.errors import ConfigError

Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """How a site reads its table, and which rows are for testing.

    >>> SiteSettings(target="outcome").targets
    ('outcome',)
    """

    target: Annotated[str | Names | None, "column to predict; several for numbers that belong together: event,time"] = (
        None
    )
    ignore: Annotated[Names, "columns that are not used, such as names and numbers of patients"] = ()
    categories: Annotated[Names, "columns of numbers that are codes, to read as categories"] = ()
    missing: Annotated[Names, "more texts that mark a missing value, such as -999"] = ()
    decimal: Annotated[Literal[".", ","] | None, "decimal separator; default: found in the file"] = None
    date_format: Annotated[str | None, "format of dates, such as %d/%m/%Y; default: found in the file"] = None
    regression: Annotated[bool | None, "whether an integer target is a number to predict instead of a class"] = None
    survival: Annotated[bool, "whether the two columns of the target are an event and its time: event,time"] = False
    test: Annotated[
        float | str, "fraction of each site's rows that is held out for testing; or a column with train or test"
    ] = 0.25
    min_count: Annotated[
        PositiveInt, "rows that a category, or a statistic, must have at a site before the site reports it"
    ] = 5

    def __post_init__(self) -> None:
        for name in ("ignore", "categories", "missing"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.target is not None and not isinstance(self.target, str):
            object.__setattr__(self, "target", tuple(self.target))
        check_fields(self, "data.")
        if self.survival and len(self.targets) != 2:
            raise ConfigError("With data.survival, data.target must be two columns, as in event,time.")
        if not isinstance(self.test, str) and not 0 < self.test < 1:
            raise ConfigError(
                f"data.test must be a fraction between 0 and 1, or the name of a column, got {self.test}."
            )

    @property
    def targets(self) -> Names:
        """The columns to predict."""
        return (self.target,) if isinstance(self.target, str) else self.target or ()


@dataclass(frozen=True, kw_only=True)
class TableSettings(SiteSettings):
    """How tables become a federation.

    >>> TableSettings(target="outcome", fit="site").fit
    'site'
    """

    fit: Annotated[
        Literal["federation", "site"],
        "whose training rows imputation and standardization are fitted on: those of all sites, from their sums, or of "
        "each site alone",
    ] = "federation"
    columns: Annotated[
        Literal["all", "common"], "all: a site imputes the columns that it lacks; common: columns that all sites have"
    ] = "all"
    standardize: Annotated[bool, "shift and scale numbers and dates to mean 0 and standard deviation 1"] = True
    missing_indicator: Annotated[bool, "add a feature that is 1 where a value is missing"] = False
