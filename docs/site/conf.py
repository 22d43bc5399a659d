"""Sphinx configuration of the documentation site. `make docs` builds it from the pages that `pages.py` collects."""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from fedtailor.version import VERSION

project = "FedTailor"
author = "the FedTailor developers"
version = release = VERSION

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["files/**"]  # linked files of the repository, which are downloads
suppress_warnings = ["mystnb.unknown_mime_type"]  # plotly's own format; its notebooks also have HTML

# Links to headings use GitHub's anchors, so that pages work there too.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True

# Docstrings are plain text with `code` in single backticks.
default_role = "code"
autosummary_generate = True
templates_path = [str(Path(__file__).parent / "templates")]  # autosummary looks in the pages' folder otherwise
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries and internal ones have no page

html_theme = "pydata_sphinx_theme"
html_title = "FedTailor"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "FedTailor"},
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "article_footer_items": [],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_context = {"default_mode": "auto"}
_SINGLE_PAGES = (  # without pages below or beside them
    "getting_started", "concepts", "numbers", "faq", "coming_from", "security", "changelog", "contributing",
    "architecture",
)  # fmt: skip
html_sidebars: dict[str, list[str]] = {page: [] for page in _SINGLE_PAGES}


_attributes: dict[str, list[str]] = {}  # name -> lines of the docstring


def convert_tables(app: Sphinx, kind: str, name: str, object: Any, options: Any, lines: list[str]) -> None:
    """Make list tables of the Markdown tables in a docstring."""
    converted = list[str]()
    for before, line in zip(["", *lines], lines, strict=False):
        if not line.startswith("|"):
            converted.append(line)
        elif not line.startswith("|---"):
            if not before.startswith("|"):
                converted += [".. list-table::", "   :header-rows: 1", ""]
            first, *others = (cell.strip() for cell in line.strip("|").split("|"))
            converted += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
    lines[:] = converted


def keep_attribute(app: Sphinx, kind: str, name: str, object: Any, options: Any, lines: list[str]) -> None:
    """Keep the docstring of an attribute as it is, because napoleon takes what is before a colon for its type."""
    if kind in ("attribute", "property", "data"):
        lines[:] = _attributes.setdefault(name, list(lines))


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", convert_tables)
    app.connect("autodoc-process-docstring", keep_attribute, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", keep_attribute, priority=600)  # after napoleon
