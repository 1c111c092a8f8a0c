"""The response cache: an exact key, then similarity of embeddings within the same scope.

Imports nothing of the side that builds models; embeddings, Redis and vector databases are extras.
"""
