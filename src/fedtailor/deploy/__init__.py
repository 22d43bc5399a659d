"""Real federations on Flower: a server and clients on separate machines run the same methods as a simulation.

`server` runs on the operator's machine, `client` on each client's machine; the modules here are used by both. This
package requires the extra `flower`.
"""
