"""Lookup by meaning: embeddings of questions, an index of them a scope, and the checks that a near one must pass."""
