"""Clients of one run in several processes or machines: the engine `ray`.

ray_clients.py    the clients as the trainer sees them; messages go to actors, and uploads or their mean come back
worker.py         what an actor does: it keeps the states of its clients and trains them with an ordinary engine
shard.py          which clients an actor has, and the samples that it receives
packets.py        trees as arrays that Ray moves between processes
remote_states.py  states in the actors, for checkpoints
evaluation.py     evaluation in the actors
start.py          how many actors there are, and which engine they use
cluster.py        connects to a cluster, and starts and calls actors; the only file that imports ray

Which actor trains a client changes nothing but the order of additions, so results are those of one process to the
engine's tolerance, and repeat exactly for the same number of actors. The states of clients stay in the actors; a
checkpoint contains them in the usual format, so a run can be resumed with another engine or number of actors. When an
actor is lost, all actors are started again and continue from the last checkpoint (`training/recovery.py`).
"""
