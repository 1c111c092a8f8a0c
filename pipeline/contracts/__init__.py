"""Facts about upstream versions and hardware, as data (`data/*.yaml`, each with its source), and functions that answer.

A release, a GPU, a model or a rule is added by adding data; the header of each file says how. Nothing of upstream is
imported, and nothing is decided here: what follows from the facts is worked out in `pipeline.plan` and the runtimes.
"""
