"""Deployments measured: `pipeline bench`, `compare`, `tune` and `accept`, over one load generator.

settings    settings of a load, and of the server that is measured
subject     the server: a deployment of this machine, an address, or a package that is served meanwhile
workload    conversations, made of words at random of given lengths
prompts     the same from a file, a calibration set or a trace; the workload of a run
targets     clients: Triton by our client, or a server of OpenAI's API
load        the load generator: sends requests, and records every one
summary     figures of a load from its records, held against the recipe's SLO
statistics  percentiles with intervals, and ratios over rounds
result      figures of a run: JSON, its schema, and the run in a sentence
run         all of this, from settings to a result; sweeps
forecast    forecasts of `pipeline plan` for the same loads, and the plan's constants fitted to runs
page        a run as one HTML file, with `pictures`
engine_model  the engine's own model of a deployment, asked with token ids

compare     two runs, deployments or packages beside each other
tune        values of a recipe tried on a real server
accept      a recipe checked on this machine from end to end
"""

import os

# gRPC writes of lost connections to standard error by itself. It reads this when it is imported, hence not before here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
