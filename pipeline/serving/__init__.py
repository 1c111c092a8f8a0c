"""Putting a package to work, on this machine or in a container.

serve            a package served until Ctrl-C: checked, started, announced, health-checked, ended
served           `pipeline serve` as a process of its own, for what measures or judges a deployment
preflight        what keeps this machine from serving it
dry_run          what `serve` would run
server           a Triton server as a context: started, ready, gone after
launch           what every start has in common; launch_embedded, launch_gpu and launch_docker: the commands
health           whether a server really answers
triton_log       what its log says about a failure
entrypoint       what our container runs
"""
