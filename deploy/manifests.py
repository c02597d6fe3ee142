#!/usr/bin/env python3
"""Plain Kubernetes manifests of the chart, for clusters without Helm: what `helm template` would print.

    make setup
    build/python/bin/python3 deploy/manifests.py -f my-values.yaml --namespace training > lmhead.yaml
    kubectl apply -n training -f lmhead.yaml

Values of a later -f win over those of an earlier one. Helm itself renders, as the library of the package helm-python-sdk; no cluster is
asked. Values that the chart's schema refuses end it with status 1 and Helm's message.
"""

import argparse
import functools
import pathlib
import sys

import helm_python as helm
import yaml

CHART = pathlib.Path(__file__).resolve().parent / "helm/lmhead"


@functools.lru_cache(maxsize=1)
def _loaded():
    return helm.Chart.load(CHART), helm.Config(namespace="default")


def manifest(values, name, namespace):
    """The text of all objects. Raises helm.HelmError for values that the schema or a template refuses."""
    chart, config = _loaded()
    return config.install(chart, name, values, namespace=namespace, dry_run="client")["manifest"]


def merged(base, over):
    """As Helm merges values: objects key by key, everything else as a whole."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: merged(base[key], over[key]) if key in base and key in over else over.get(key, base.get(key))
                for key in {**base, **over}}
    return over


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("-f", "--values", action="append", default=[], type=pathlib.Path, help="a file of values; may be repeated")
    parser.add_argument("--name", default="lmhead", help="of the release")
    parser.add_argument("--namespace", default="default")
    options = parser.parse_args()
    values = functools.reduce(merged, (yaml.safe_load(path.read_text()) or {} for path in options.values), {})
    try:
        print(manifest(values, options.name, options.namespace), end="")
    except helm.HelmError as error:
        print(f"manifests: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
