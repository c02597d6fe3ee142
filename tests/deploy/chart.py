"""The chart as Helm renders it: values in, Kubernetes objects out. No cluster is asked."""

import copy
import functools
import pathlib
import sys

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))

import manifests  # noqa: E402, the file that users run

CHART = manifests.CHART
VALUE_SETS = sorted((CHART / "ci").glob("*.yaml"))


def render(values, name="lmhead", namespace="training"):
    """The objects. Raises helm.HelmError for values that the schema or a template refuses."""
    return [document for document in yaml.safe_load_all(manifests.manifest(values, name, namespace)) if document]


@functools.lru_cache(maxsize=None)
def _rendered(path):
    return render(yaml.safe_load(path.read_text()))


def rendered(path):
    """The objects of a value set; a copy of its own for each caller."""
    return copy.deepcopy(_rendered(path))


def of_kind(objects, kind):
    return [o for o in objects if o["kind"] == kind]


def pod_templates(objects):
    """Every pod template with the object that owns it."""
    for o in objects:
        if o["kind"] in ("StatefulSet", "Deployment", "DaemonSet", "Job"):
            yield o, o["spec"]["template"]
        elif o["kind"] == "LeaderWorkerSet":
            template = o["spec"]["leaderWorkerTemplate"]
            for key in ("leaderTemplate", "workerTemplate"):
                if key in template:
                    yield o, template[key]


def containers(objects):
    for _, template in pod_templates(objects):
        yield from template["spec"].get("initContainers", []) + template["spec"]["containers"]


def servers(objects):
    """Those that trainers address and the kubelet probes; a follower has no ports."""
    return [container for container in containers(objects) if container["args"][0] == "serve"]
