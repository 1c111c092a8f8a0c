"""Files by which other tools run and watch a package: Docker, Compose, systemd, Kubernetes, Prometheus and Grafana.

    docker      Triton alone, in NVIDIA's own image; whoever runs it watches it
    compose     Triton and the OpenAI gateway, in the images of our Dockerfile, with health checks by inference
    systemd     `pipeline serve` of this installation as a service of the machine, whatever it is made of
    kubernetes  as many of both as are needed, on many machines
    monitoring  recording rules, alerts with their unit tests, and a dashboard

The files themselves are in templates/; the modules here decide what is filled in. Nothing is started.
"""
