"""Batches of requests, and the files that they are made from and end in.

`objects` has what clients see, `storage` keeps it in one of `places`, `runner` answers the requests of batches that it
has in `claims`; `endpoints` and `message_batches` are OpenAI's and Anthropic's view of the same batches.
"""
