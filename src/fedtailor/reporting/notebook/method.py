"""A method as HTML: its paper, its fields with their help texts, and what it sends and keeps."""

from dataclasses import fields

from fedtailor.core.fields import help_texts
from fedtailor.core.method import Method
from fedtailor.reporting.notebook.markup import block, html_table, text


def method_html(method: Method) -> str:
    """Return the description of a method and the values of its fields."""
    helps = help_texts(type(method))
    names = [field.name for field in fields(method) if field.name not in method.fixed_settings]
    rows = [[name, repr(getattr(method, name)), helps[name]] for name in names]
    paper = f"<div>{text(method.citation())}.</div>" if method.citation() else ""
    table = html_table(["field", "value", "meaning"], rows, left=3) if rows else ""
    sent = f"A client receives: {method.download}; sends: {method.upload}; keeps: {method.client_state}."
    return block(method.display_name, paper, table, note=sent)
