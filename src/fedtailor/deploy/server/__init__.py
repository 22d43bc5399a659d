"""The operator's side: the SuperLink behind a reverse proxy, the coordinator of the run, and the operator's folder."""
