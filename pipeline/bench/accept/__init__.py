"""A recipe checked on this machine from end to end: `pipeline accept`. One report says so, to be sent to anybody.

    report = accept(recipe, store, AcceptSettings(), Path("accept-llama-3.1-8b-fp8.json"), progress=progress)
    report.accepted

It builds, serves as a user does, streams, and holds the measurements against the plan, the gate and the SLO.

settings    settings of a run
run         the steps in their order
state       results of earlier steps for later ones
making      plan, build, serve, memory and metrics of the deployment, and its end
answering   streams, golden questions, upstream's client, the draft, cancellation, the gate
measuring   latency alone and under load
judging     figures held against expectations
upstream    TensorRT-LLM's own clients
report      the file that is written
"""
