"""Inventory of a machine, for `doctor`, `build` and `deploy`.

It reads files of the kernel and asks a few programs, each with a deadline. It judges nothing, and reports what is unknown. The whole is `inventory.take`; what rules need of it is `pipeline.plan.machine_facts.MachineFacts`.
"""
