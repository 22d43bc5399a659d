"""The papers' tables: what was printed, with which settings, and a runner that repeats them with torch and numpy alone.

python -m fedtailor.papers run fedapa table-1 --only cifar10 --seeds 0,1,2 --device cuda --parallel 8
"""

from fedtailor.papers.definition import PAPERS, load_paper
from fedtailor.papers.running import compare, run, select_cells

__all__ = ["PAPERS", "compare", "load_paper", "run", "select_cells"]
