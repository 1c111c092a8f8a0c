"""Putting a package to work: on this machine, in a container, on a cluster."""
