"""What a model over several machines may have besides: RDMA, and a part of the network for each group of machines.

RDMA pins memory. A process may pin any amount with the capability IPC_LOCK, or as far as its limit `memlock` goes,
which pods inherit from the container runtime. Kubernetes gives added capabilities to root alone (kubernetes/kubernetes
issue 56374), and neither "restricted" nor "baseline" of the Pod Security Standards allows this one
(https://kubernetes.io/docs/concepts/security/pod-security-standards/): so ranks run as root then, in a namespace whose
level is "privileged".
"""

from __future__ import annotations

from typing import Any

from pipeline.serving.manifests.kubernetes.cluster import LWS, Cluster, Object, kustomization, patch_of
from pipeline.serving.manifests.kubernetes.workloads import group

# Of NVIDIA's network operator, as its examples name it; an Elastic Fabric Adapter is vpc.amazonaws.com/efa.
RDMA_DEVICE = "rdma/rdma_shared_device_a"
# For root: pinned memory, and what sshd needs to start a session.
_CAPABILITIES = ["IPC_LOCK", "AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT"]


def rdma_files(cluster: Cluster) -> dict[str, str]:
    """Write the component that gives ranks an RDMA device and pinned memory.

    Args:
        cluster: The deployment in its cluster, over several machines.
    """
    template = group(cluster)["spec"]["leaderWorkerTemplate"]
    operations = [
        operation
        for role in ("leaderTemplate", "workerTemplate")
        for operation in _as_root_with_device(
            f"/spec/leaderWorkerTemplate/{role}/spec", template[role]["spec"]
        )
    ]
    comment = f"""
An RDMA device for each machine of a group, by the name of your device plugin ({RDMA_DEVICE} is that of NVIDIA's
network operator), and memory that may be pinned: ranks run as root with IPC_LOCK, which takes the namespace of
overlays/rdma-namespace. Where the container runtime of your nodes does not limit memlock, leave out all operations but
the first two of each template, and the namespace as it is.
"""
    patches = [patch_of("LeaderWorkerSet", cluster.server, operations)]
    return {"kustomization.yaml": kustomization(comment, component=True, patches=patches)}


def exclusive_topology_files(cluster: Cluster) -> dict[str, str]:
    """Write the component that gives each group of machines a part of the network of its own.

    Args:
        cluster: The deployment in its cluster, over several machines.
    """
    operation = {
        "op": "add",
        "path": "/metadata/annotations",
        "value": {f"{LWS}/exclusive-topology": "topology.kubernetes.io/zone"},
    }
    comment = """
Each group of machines alone in one domain of the network: at most as many groups as there are domains. Which domain is
the value, a label of your nodes: topology.kubernetes.io/zone is everywhere; a rack or block is better where nodes
have a label of theirs (cloud.google.com/gce-topology-block, topology.k8s.aws/network-node-layer-1).
Without this component, the machines of a group are in one zone, which groups share.
"""
    patches = [patch_of("LeaderWorkerSet", cluster.server, [operation])]
    return {"kustomization.yaml": kustomization(comment, component=True, patches=patches)}


def privileged_namespace_files(cluster: Cluster) -> dict[str, str]:
    """Write the overlay of the namespace in which `rdma_files` is admitted.

    Args:
        cluster: The deployment in its cluster, over several machines.
    """
    level = {
        "op": "replace",
        "path": "/metadata/labels/pod-security.kubernetes.io~1enforce",
        "value": "privileged",
    }
    comment = """
The namespace for overlays/rdma, applied once in place of namespace/: root with IPC_LOCK is admitted in it, and still
warned of.
  kubectl apply -k overlays/rdma-namespace/
"""
    patches = [patch_of("Namespace", cluster.options.namespace, [level])]
    return {"kustomization.yaml": kustomization(comment, resources=["../../namespace"], patches=patches)}


def _as_root_with_device(path: str, pod: Object) -> list[dict[str, Any]]:
    container, device = f"{path}/containers/0", RDMA_DEVICE.replace("/", "~1")
    (ssh,) = (index for index, volume in enumerate(pod["volumes"]) if volume["name"] == "ssh")
    root = {**pod["securityContext"], "runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    # ssh takes no key that others than its user may read.
    root = {key: value for key, value in root.items() if not key.startswith("fsGroup")}
    return [
        {"op": "add", "path": f"{container}/resources/requests/{device}", "value": "1"},
        {"op": "add", "path": f"{container}/resources/limits/{device}", "value": "1"},
        {
            "op": "add",
            "path": f"{container}/securityContext/capabilities/add",
            "value": list(_CAPABILITIES),
        },
        {"op": "replace", "path": f"{path}/securityContext", "value": root},
        {"op": "replace", "path": f"{path}/volumes/{ssh}/secret/defaultMode", "value": 0o400},
    ]
