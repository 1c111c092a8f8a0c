"""Inventory of a machine, for `doctor`, `build` and `deploy`.

It reads files of the kernel and asks a few programs, each with a deadline. It judges nothing, and reports what is
unknown. The whole is `inventory.take`; rules get `pipeline.plan.machine_facts.MachineFacts` from it.
"""
