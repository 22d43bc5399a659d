"""Readers of LEAF's data sets, whose clients are people or roles: FEMNIST, Sent140, and Shakespeare.

LEAF's script `preprocess.sh` writes JSON files, and these readers convert them to arrays:

    data/train/*.json       {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}
    data/test/*.json        the same, for the samples that LEAF held out
    data/all_data/*.json    the same, for all samples; read if there is no folder train

The files are untrusted, and may be larger than memory: one user after another is read and converted.
"""
