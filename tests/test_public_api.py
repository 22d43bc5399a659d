"""The names that editors and notebooks offer."""

from types import ModuleType

import pytest

import fedtailor as ft


@pytest.mark.parametrize("module", [ft, ft.methods])
def test_dir_lists_the_public_api_only(module: ModuleType) -> None:
    listed = [name for name in dir(module) if not name.startswith("__")]
    assert listed == sorted(module.__all__) and all(hasattr(module, name) for name in listed)
    assert {"__doc__", "__file__", "__name__"} <= set(dir(module))
