"""The gateway as a process of `pipeline`: which models it serves, where their servers are, and how it starts."""
