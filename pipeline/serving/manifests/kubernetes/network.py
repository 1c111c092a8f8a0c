"""Who may talk to whom: networking.k8s.io/v1 NetworkPolicy, made of the addresses that the deployment names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

import yaml

from pipeline.serving.manifests.kubernetes.cluster import REDIS_PORT, Cluster, Component, Object, documents

_HTTPS, _POSTGRES = 443, 5432
# Where pods that have no Secret with credentials ask for those of their node or ServiceAccount.
# AWS: instance metadata, and the EKS Pod Identity agent (docs.aws.amazon.com/eks, pod-id-agent-setup); roles of a
# ServiceAccount (IRSA) come from STS, by HTTPS. Google: the metadata server of GKE, with Dataplane V2 and without
# (cloud.google.com/kubernetes-engine, workload identity and network policy). Azure: instance metadata; workload
# identities come by HTTPS.
_METADATA = {
    "s3": (("169.254.169.254/32", (80,)), ("169.254.170.23/32", (80,)), ("fd00:ec2::23/128", (80,))),
    "gs": (("169.254.169.254/32", (80, 8080)), ("169.254.169.252/32", (987, 988))),
    "az": (("169.254.169.254/32", (80,)),),
}


def network_file(cluster: Cluster) -> str:
    """Write network.yaml.

    Args:
        cluster: The deployment in its cluster.
    """
    ports = cluster.description.server.ports
    packages = list(_to_packages(cluster))
    triton_in = [
        _rule("from", [_pods(cluster, "gateway")], ports["grpc"]),
        _rule("from", [_namespace(_monitoring_namespace(cluster))], ports["metrics"]),
    ]
    if "http" in ports:
        triton_in.append(_rule("from", [], ports["http"]))
    triton_out = [*packages]
    if cluster.nodes > 1:
        # MPI and NCCL choose their ports themselves.
        triton_in.append({"from": [_pods(cluster, "triton")]})
        triton_out.append({"to": [_pods(cluster, "triton")]})
    gateway_in = [_rule("from", [], cluster.description.gateway.ports["http"])]
    gateway_out = [_rule("to", [_pods(cluster, "triton")], ports["grpc"]), *_to_cache(cluster), *packages]
    policies = [
        _nothing_but_dns(cluster),
        _policy(cluster, "triton", cluster.server, triton_in, triton_out),
        _policy(cluster, "gateway", cluster.gateway, gateway_in, gateway_out),
    ]
    if cluster.options.redis is None:
        asked = [_rule("from", [_pods(cluster, "gateway")], REDIS_PORT)]
        policies.append(_policy(cluster, "redis", cluster.redis, asked, []))
    comment = """
Who may talk to whom: clients to gateways, gateways to servers and Redis, Prometheus to pages of metrics, all to DNS,
and pods to what this deployment names: its object store with the places where credentials come from, its caches.
Nothing else, in either direction. It takes a network that knows NetworkPolicy.
"""
    return documents(comment, *policies)


def _to_packages(cluster: Cluster) -> Iterator[Object]:
    """To the object store, and to where its credentials come from."""
    address = cluster.options.packages
    if address is None:
        return
    parts = urlsplit(address)
    for endpoint in parse_qs(parts.query).get("endpoint", []):
        parts = urlsplit(endpoint)
    yield _rule("to", [], parts.port or {"http": 80}.get(parts.scheme, _HTTPS))
    for block, ports in _METADATA.get(parts.scheme, ()):
        yield {
            "to": [{"ipBlock": {"cidr": block}}],
            "ports": [{"port": port, "protocol": "TCP"} for port in ports],
        }


def _to_cache(cluster: Cluster) -> Iterator[Object]:
    """To Redis, to the server that the recipe's cache names, and to the Hub for encoders of near questions."""
    if cluster.options.redis is None:
        yield _rule("to", [_pods(cluster, "redis")], REDIS_PORT)
    else:
        yield _rule("to", [], urlsplit(cluster.options.redis).port or REDIS_PORT)
    settings = (yaml.safe_load(cluster.recipe) if cluster.recipe else {}).get("cache") or {}
    backend = settings.get("backend") or {}
    parts = urlsplit(backend.get("url") or "")
    if parts.hostname not in (None, cluster.redis):
        yield _rule("to", [], parts.port or (REDIS_PORT if backend["kind"] == "redis" else _POSTGRES))
    if not settings.get("enabled"):
        return
    semantic = settings.get("semantic") or {}
    if any(str(semantic.get(key) or "").startswith("hf:") for key in ("embedder", "verifier")):
        yield _rule("to", [], _HTTPS)


def _nothing_but_dns(cluster: Cluster) -> Object:
    dns = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": cluster.name, "labels": {"app.kubernetes.io/instance": cluster.name}},
        "spec": {
            "podSelector": {
                "matchLabels": {"app.kubernetes.io/instance": cluster.name},
                # Who builds fetches models from the Hub.
                "matchExpressions": [
                    {"key": "app.kubernetes.io/name", "operator": "NotIn", "values": ["build"]}
                ],
            },
            "policyTypes": ["Ingress", "Egress"],
            "egress": [{"ports": dns}],
        },
    }


def _policy(
    cluster: Cluster, component: Component, name: str, ingress: Sequence[Object], egress: Sequence[Object]
) -> Object:
    spec = {
        "podSelector": {"matchLabels": cluster.selector(component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": list(ingress),
        **({"egress": list(egress)} if egress else {}),
    }
    return cluster.object("networking.k8s.io/v1", "NetworkPolicy", name, component, spec=spec)


def _rule(direction: str, peers: Sequence[Object], port: int) -> Object:
    """A rule of a NetworkPolicy; without peers it holds for all."""
    rule: Object = {"ports": [{"port": port, "protocol": "TCP"}]}
    return {direction: list(peers), **rule} if peers else rule


def _pods(cluster: Cluster, component: Component) -> Object:
    return {"podSelector": {"matchLabels": cluster.selector(component)}}


def _namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _monitoring_namespace(cluster: Cluster) -> str:
    """Where Prometheus runs: the second part of the name of its Service."""
    host = urlsplit(cluster.options.prometheus).hostname or ""
    parts = host.split(".")
    return parts[1] if len(parts) > 1 and parts[1] else "monitoring"
