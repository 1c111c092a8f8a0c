"""OpenAI-compatible HTTP gateway in front of Triton and the response cache.

A request for a completion goes through `server` (connections), `access_log` and `web` (middleware), `app` (routes,
authentication by `tenants`) and `api`, where it becomes choices, within the `limits` of tenant and queue, on a
`served_model`.

The modules need the extra `gateway`; importing this package needs nothing.
"""
