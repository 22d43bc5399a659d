"""Makes the pictures of the pages from real runs: `make pictures` (about a minute)."""

import contextlib
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from fedtailor import cli

COMMAND = (
    "fedtailor compare local fedavg fedper scaffold ditto --data digits --data.clients 20 --data.alpha 0.1 "
    "--rounds 20 --batch-size 16 --seeds 0,1,2"
)
# a plain frame that names no font to download
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="what the command prints">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate(8, 8)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main() -> None:
    path = Path(__file__).parent.absolute() / "comparison.svg"
    cli.out = console = Console(record=True, width=80, force_terminal=True)
    console.print(f"$ {COMMAND}", highlight=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.argv = COMMAND.split()
        cli.app(standalone_mode=False)
    console.save_svg(str(path), title="", code_format=FRAME, unique_id="t")


if __name__ == "__main__":
    main()
