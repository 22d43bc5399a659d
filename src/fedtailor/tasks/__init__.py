"""Many runs at once: one run per task, in this process, in several processes, or on a Ray cluster.

A `Runner` runs tasks and yields their outcomes; all runners give the same numbers. `processes.py` and `ray_cluster.py`
start a task again from its checkpoint if its process dies, and stop all tasks in order after Ctrl-C.
"""
