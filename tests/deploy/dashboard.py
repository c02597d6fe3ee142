"""The Grafana dashboard as data: its panels, its queries, and what Grafana would put in for its variables."""

import json
import re

import chart

PATH = chart.ROOT / "deploy/grafana/lmhead.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def load():
    return json.loads(PATH.read_text())


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard):
    """(panel title, target) of every query of a panel."""
    return [(panel["title"], target) for panel in panels(dashboard) for target in panel["targets"]]


def interpolate(expression, rate_interval, time_range):
    """With All chosen and the defaults of the others, as Grafana does it."""
    values = {"__rate_interval": rate_interval, "__range": time_range, "datasource": "prometheus"}
    for variable in load()["templating"]["list"]:
        if variable["type"] == "query":
            values[variable["name"]] = variable["allValue"]
        elif variable["type"] != "datasource":
            values[variable["name"]] = variable["current"]["value"]
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], expression)
