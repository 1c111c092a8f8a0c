"""Endpoints of the HTTP API: each module has one family of them, which `pipeline.gateway.app` lists."""
