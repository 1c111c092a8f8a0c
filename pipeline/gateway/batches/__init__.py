"""Batches of requests, and the files that they are made from and end in, on local storage.

`objects` has what clients see, `storage` keeps it, `runner` answers the requests of a batch.
"""
