"""OpenAI-compatible HTTP gateway in front of Triton and the response cache.

A request for a completion goes through `http_server` and `connections`, `access_log` and `web` (middleware), `app` and
`routes`, authentication by `tenants` in `context`, and `api`, where it becomes choices, within the `limits` of tenant
and queue, on a `served_model`.

The modules need the extra `gateway`; importing this package and `settings` needs nothing.
"""
