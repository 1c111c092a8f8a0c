"""Batches of requests, and the files that they are made from and end in.

`objects` has what clients see, `storage` keeps it in a `folder` or in `postgres`, `runner` answers the requests.
`messages` is Anthropic's view of the same batches.
"""
