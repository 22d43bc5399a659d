"""Find a site whose numbers are off by a factor, as with centimeters and inches, from means and deviations only."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from statistics import median

from fedtailor.data.tables.summary import Moments

_FACTORS = {
    10.0: "a power of ten", 100.0: "a power of ten", 1000.0: "a power of ten", 10.0**6: "a power of ten",
    2.54: "inches and centimeters", 2.2046: "kilograms and pounds", 3.2808: "meters and feet",
    30.48: "feet and centimeters", 28.35: "ounces and grams", 12.0: "years and months", 365.25: "years and days",
    18.02: "mmol/L and mg/dL of glucose", 38.67: "mmol/L and mg/dL of cholesterol",
    88.57: "mmol/L and mg/dL of triglycerides, or mg/dL and µmol/L of creatinine",
}  # fmt: skip
# Ordinary differences between sites in the same unit: half a standard deviation of the means, within these limits of
# the logarithm of their ratio, and a factor of 1.5 of the standard deviations.
_MIN_TOLERANCE, _MAX_TOLERANCE, _STD_TOLERANCE = 0.03, 0.15, log(1.5)
_MIN_DISTANCE = 3.0  # between means, in standard deviations of the site with smaller numbers


@dataclass(frozen=True)
class SuspectedFactor:
    """The ratio of a site's numbers to those of the others."""

    factor: float
    mean: float  # of the site
    others: float  # median of the means of the other sites
    units: str


def suspect_factors(moments: Mapping[str, Moments]) -> dict[str, SuspectedFactor]:
    """Return the sites whose mean and standard deviation differ from the median of the others by a known factor.

    The means must also be far apart in units of the smaller deviation: sites with other patients have other means, but
    rarely by such a factor and with deviations that differ by the same one. Of two sites, only the second is returned,
    because nothing says which one is right.

    >>> sites = {"a": Moments(50, 8500.0, 4900.0), "b": Moments(50, 3350.0, 760.0)}  # 170 ± 10 cm, 67 ± 3.9 inches
    >>> round(1 / suspect_factors(sites)["b"].factor, 2)
    2.54
    """
    usable = {site: found for site, found in moments.items() if found.mean and not found.is_constant}
    found = dict[str, SuspectedFactor]()
    for site, own in usable.items():
        others = [other for name, other in usable.items() if name != site]
        if not others or (len(others) == 1 and site == next(iter(usable))):
            continue
        mean, std = median(other.mean for other in others), median(other.std for other in others)
        tolerance = min(max(0.5 * own.std / abs(own.mean), _MIN_TOLERANCE), _MAX_TOLERANCE)
        factor = _match(own.mean / mean, own.std / std, tolerance) if mean else None
        if factor and abs(own.mean - mean) > _MIN_DISTANCE * min(own.std, std):
            known = factor if factor > 1 else 1 / factor
            units = min(_FACTORS, key=lambda candidate: abs(log(candidate / known)))
            found[site] = SuspectedFactor(factor, own.mean, mean, _FACTORS[units])
    return found


def _match(ratio_of_means: float, ratio_of_stds: float, tolerance: float) -> float | None:
    """Return the known factor, or its inverse, that is closest to both ratios, if it is close enough."""
    if ratio_of_means <= 0 or ratio_of_stds <= 0:
        return None
    candidates = [value for factor in _FACTORS for value in (factor, 1 / factor)]
    best = min(candidates, key=lambda factor: abs(log(ratio_of_means / factor)))
    is_close = abs(log(ratio_of_means / best)) < tolerance and abs(log(ratio_of_stds / best)) < _STD_TOLERANCE
    return best if is_close else None
