"""What a machine is and has, gathered in one place for `doctor`, `build` and `deploy`.

It reads files of the kernel and asks a few programs, each with a deadline. It judges nothing, and says what it cannot
tell. The whole is `inventory.take`; what rules need of it is `pipeline.plan.machine_facts.MachineFacts`.
"""
