"""Databases in which a gateway keeps files, batches and stored responses, and the choice among them.

`database` is the protocol, and SQLite for a gateway that serves alone; `postgres` is a server that several gateways
share; `opening` chooses by what the recipes and the command line name.
"""
