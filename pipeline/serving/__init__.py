"""Putting a package to work, on this machine or in a container.

serve            packages served until Ctrl-C: checked, started, announced, supervised, ended
supervisor       a keeper for each Triton and for the gateway; triton_component and gateway_process are kept
rollout          exchange of a package while it is served; exchange asks for it
server           a Triton server as a context: started, ready, gone after
launch           the start of a server as a value; launch_embedded, launch_gpu and launch_docker make it
settings         options of `pipeline serve` and `pipeline deploy`
deployments      the recipe and the server that a name stands for
announcement     the record of a deployment; control: commands to its supervisor; status: a look from outside
monitor          whether a server that was ready still works, by probe and live
dry_run          faults of this machine, and the commands that `serve` would run
served           `pipeline serve` as a process of its own, for programs that measure or judge a deployment
entrypoint       main program of our container; health: its probe; group: several machines as one server
"""
