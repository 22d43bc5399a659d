"""The command env."""

from fedtailor.cli.output import print_line
from fedtailor.runs.environment import commit_text, describe_environment, optional_packages


def env() -> None:
    """Print versions, device, and git commit, for bug reports.

    The output contains no path and no name of a user or a computer.
    """
    found = describe_environment()
    rows = {name.replace("_", " "): str(value) for name, value in found.items() if name != "git"}
    rows["git commit"] = commit_text({"environment": found})
    for extra, packages in optional_packages().items():
        rows[f"[{extra}]"] = ", ".join(f"{name} {version or 'not installed'}" for name, version in packages.items())
    width = max(map(len, rows))
    for name, value in rows.items():
        print_line(f"{name:{width}}  {value}")
