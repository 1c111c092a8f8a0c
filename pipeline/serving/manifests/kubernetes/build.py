"""The Job that builds the package on a GPU of the cluster, and puts it where servers find it."""

from __future__ import annotations

import yaml

from pipeline import __version__
from pipeline.serving.manifests.description import RECIPE_FILE, STORE
from pipeline.serving.manifests.kubernetes.cluster import (
    Cluster,
    Object,
    documents,
    dump,
    kustomization,
)
from pipeline.serving.manifests.kubernetes.pods import (
    USER,
    container_security,
    from_secret,
    object_store_credentials,
    on_gpus,
    pod_security,
    template_of,
)
from pipeline.serving.manifests.kubernetes.volumes import (
    build_mounts,
    build_volumes,
    quantity,
    reserved_storage,
)

_QUESTIONS = "golden.jsonl"


def can_build(recipe: str | None) -> bool:
    """Whether a cluster can have what the recipe is made from: folders of this machine are not there."""
    if recipe is None:
        return False
    values = yaml.safe_load(recipe)
    sources = [values["model"]["source"], (values.get("draft") or {}).get("source", "hf:")]
    return all(str(source).startswith("hf:") for source in sources)


def build_files(cluster: Cluster, recipe: str) -> dict[str, str]:
    """Write the folder with the Job.

    Args:
        cluster: The deployment in its cluster.
        recipe: Its text, all values resolved.
    """
    package = cluster.description.package_name
    job = cluster.object(
        "batch/v1", "Job", f"{cluster.name}-build-{package.rpartition('-')[2][:10]}".lower(), "build",
        spec={"backoffLimit": 2, "ttlSecondsAfterFinished": 7 * 24 * 3600, "template": _build_pod(cluster)},
    )  # fmt: skip
    where = "on the volume" if cluster.options.packages is None else f"in {cluster.options.packages}"
    comment = f"""
Builds {package} on a GPU of the cluster, and leaves it {where}. Its name is that of the package:
another recipe is another Job, and one that ran already finds everything made. The token for gated models is a Secret:
  kubectl create secret generic {cluster.secret("hub")} -n {cluster.options.namespace} --from-literal=token=hf_…
"""
    files = {"recipe.yaml": recipe}
    if (golden := cluster.options.recipe.golden) is not None and cluster.options.questions is not None:
        section = golden.model_dump(mode="json") | {"file": _QUESTIONS}
        files = {
            "recipe.yaml": dump({**yaml.safe_load(recipe), "golden": section}),
            _QUESTIONS: cluster.options.questions,
        }
    head = kustomization(
        "The package, before it can be served.\n  kubectl apply -k build/\n"
        f"  kubectl wait --namespace {cluster.options.namespace} --for=condition=complete --timeout=6h "
        f"job/{job['metadata']['name']}",
        namespace=cluster.options.namespace,
        resources=["job.yaml"],
        configMapGenerator=[{"name": f"{cluster.settings}-built", "files": list(files)}],
    )
    return {"kustomization.yaml": head, "job.yaml": documents(comment, job), **files}


def _build_pod(cluster: Cluster) -> Object:
    """Make the template of a pod that builds the package on a GPU, and puts it where servers find it."""
    gpus = {"nvidia.com/gpu": "1"} if cluster.description.deployment.requirements is not None else {}
    volumes = build_volumes(cluster)
    storage = {"ephemeral-storage": reserved_storage(volumes)}
    taken = {"memory": quantity(cluster.sizes.build_memory), **storage, **gpus}
    own = {
        "image": cluster.options.build_image or f"pipeline-build:{__version__}",
        "imagePullPolicy": "IfNotPresent",
        "securityContext": container_security(),
        "volumeMounts": build_mounts(),
    }
    build = {
        "name": "build",
        **own,
        "args": ["build", RECIPE_FILE, "--store", STORE],
        "env": [from_secret("HF_TOKEN", cluster.secret("hub"), "token")],
        "resources": {"requests": {"cpu": "8", **taken}, "limits": taken},
    }
    push = {
        "name": "push",
        **own,
        "args": [
            "store",
            "push",
            cluster.description.package_name,
            cluster.options.packages,
            "--store",
            STORE,
        ],
        "envFrom": [object_store_credentials(cluster)],
        "resources": {
            "requests": {"cpu": "2", "memory": "2Gi", **storage},
            "limits": {"memory": "2Gi", **storage},
        },
    }
    on_volume = cluster.options.packages is None
    spec: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": cluster.builder,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**pod_security(), "fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
        **on_gpus(cluster),
        **({} if on_volume else {"initContainers": [build]}),
        "containers": [build if on_volume else push],
        "volumes": volumes,
    }
    return template_of(cluster, "build", spec)
