"""Write the GloVe vectors of Sent140's words to a file, for a network whose embedding is not trained.

python examples/glove_vectors.py leaf/data/sent140 glove.6B.300d.txt glove.npy
fedtailor run --data sent140 --data.folder leaf/data/sent140 --data.words none \\
    --network lstm --network.pretrained glove.npy
"""

import argparse

import numpy as np

from fedtailor.data.leaf.datasets import Sent140
from fedtailor.data.leaf.glove import glove_matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="LEAF's folder of Sent140")
    parser.add_argument("glove", help="a file of the publisher, such as glove.6B.300d.txt")
    parser.add_argument("output", help="the .npy file to write")
    arguments = parser.parse_args()
    words = Sent140(folder=arguments.folder, words=None).read().vocabulary
    matrix = glove_matrix(arguments.glove, words or ())
    np.save(arguments.output, matrix)
    print(f"{np.count_nonzero(matrix.any(1)):,} of {len(matrix) - 1:,} words have vectors of {matrix.shape[1]} numbers")


if __name__ == "__main__":
    main()
