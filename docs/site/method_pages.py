"""The page of a method on the documentation site: its metadata, and what is written in docs/methods by hand."""

from dataclasses import fields
from inspect import cleandoc, getsourcefile
from pathlib import Path

import fedtailor as ft
from fedtailor.experiments.parsing import field_help
from fedtailor.methods import METHODS
from fedtailor.methods.catalog import catalog

ROOT = Path(__file__).parents[2]
SHARED = {field.name for field in fields(ft.LocalTraining)}


def method_page(name: str, guide: str | None = None) -> str:
    """Return the page of a method. `guide` is the part that is written by hand: the overview follows its introduction,
    and the fields are at its end."""
    if guide is None:
        return "\n".join([_introduction(name), _overview(name), _fields(name)])
    introduction, heading, rest = guide.partition("\n## ")
    return "\n".join([introduction, _overview(name) + heading + rest, _fields(name)])


def _introduction(name: str) -> str:
    kind = METHODS[name]
    notes = cleandoc(kind.__doc__ or "").partition("\n\n")[2]
    use = (
        f"Use `ft.methods.{kind.__name__}()`, `fedtailor run --method {name}`, or "
        f"`fedtailor compare {name} --seeds 0,1,2`, which includes local training."
    )
    return f"# {catalog()[name].display_name}\n\n{kind.citation()}.\n\n{notes}\n\n{use}\n"


def _overview(name: str) -> str:
    kind, entry = METHODS[name], catalog()[name]
    method = kind()
    source = Path(getsourcefile(kind) or "").resolve().relative_to(ROOT).as_posix()
    reasons = dict.fromkeys(kind.fixed_settings.values())
    excluded = {why: [f"`{field}`" for field, other in kind.fixed_settings.items() if other == why] for why in reasons}
    fixed = "; ".join(f"{', '.join(names)}: {why}" for why, names in excluded.items())
    rows = {
        "family": entry.family,
        "a client receives": entry.download,
        "a client sends": entry.upload,
        "a client keeps": entry.client_state,
        "a newcomer starts with": entry.newcomer_start,
        "personal models": "yes" if entry.personal else "no: all clients end with the same model",
        "global model": "yes: all clients also receive one whole model" if entry.has_global_model else "no",
        "ranked as": f"[`{method.ranking_moment}`](../numbers.md#which-moment-ranks-a-method)",
        "different networks": "yes" if kind.mixed_architectures else "no",
        "settings it excludes": fixed or "none",
        "source": f"[{source}](../../{source})",
    }
    if kind().pools_data:
        del rows["personal models"], rows["global model"]
    return f"## At a glance\n\n| {entry.display_name} | |\n|---|---|\n" + "".join(
        f"| {key} | {value} |\n" for key, value in rows.items()
    )


def _fields(name: str) -> str:
    described = field_help(METHODS[name])
    own = {field: about for field, about in described.items() if field not in SHARED}
    shared = {field: about for field, about in described.items() if field in SHARED}
    text = "\n## All fields\n\nEvery field is an argument in Python, a flag such as "
    text += f"`--method.{next(iter(described), 'lr').replace('_', '-')}`, and a key of an experiment file.\n"
    if own:
        text += "\n" + _table(own)
    if shared:
        text += "\nFields of [local training](../training.md), with the defaults of this method:\n\n" + _table(shared)
    return text


def _table(described: dict[str, tuple[str, str]]) -> str:
    rows = [f"| `{field}` | `{default}` | {_cell(text)} |\n" for field, (default, text) in described.items()]
    return "| field | default | description |\n|---|---|---|\n" + "".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
