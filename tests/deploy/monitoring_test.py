"""Rules, alerts and dashboard: well-formed, documented, and answered with data by a Prometheus that watches a server at work."""

import pathlib
import re
import subprocess
import unittest

import yaml

import chart
import dashboard
from stack import LABELS, RULES, Stack

RULES_TEST = RULES.with_name("rules_test.yaml")
OPERATING = chart.ROOT / "docs/OPERATING.md"
LOAD_SECONDS = 12


def rules(kind):
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if kind in rule]


def anchors(markdown):
    """Of each heading, as the usual renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", markdown, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Rules(unittest.TestCase):
    def promtool(self, *arguments):
        result = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, cwd=RULES.parent)
        self.assertEqual(0, result.returncode, result.stdout + result.stderr)

    def test_syntax(self):
        self.promtool("check", "rules", "--lint-fatal", RULES)

    def test_behaviour(self):
        self.promtool("test", "rules", RULES_TEST)

    def test_compose_configuration(self):
        text = (chart.ROOT / "docker/compose/prometheus.yaml").read_text()
        self.assertEqual(["/etc/prometheus/rules.yaml"], yaml.safe_load(text)["rule_files"])
        self.promtool("check", "config", "--syntax-only", chart.ROOT / "docker/compose/prometheus.yaml")

    def test_every_alert_is_shown_to_fire_and_not_to_fire(self):
        shown = {True: set(), False: set()}
        for test in yaml.safe_load(RULES_TEST.read_text())["tests"]:
            for case in test.get("alert_rule_test", []):
                shown[bool(case["exp_alerts"])].add(case["alertname"])
        alerts = {rule["alert"] for rule in rules("alert")}
        self.assertEqual(alerts, shown[True])
        self.assertEqual(alerts, shown[False])

    def test_every_recording_rule_is_tested(self):
        expressions = [case["expr"] for test in yaml.safe_load(RULES_TEST.read_text())["tests"]
                       for case in test.get("promql_expr_test", [])]
        for rule in rules("record"):
            self.assertTrue(any(rule["record"] in e for e in expressions), rule["record"])

    def test_every_alert_has_its_annotations_and_its_runbook(self):
        text = OPERATING.read_text()
        for rule in rules("alert"):
            with self.subTest(rule["alert"]):
                self.assertIn(rule["labels"]["severity"], ("critical", "warning"))
                self.assertLessEqual({"summary", "description", "runbook_url"}, set(rule["annotations"]))
                file, _, fragment = rule["annotations"]["runbook_url"].partition("#")
                self.assertEqual("docs/OPERATING.md", file)
                self.assertIn(fragment, anchors(text))
                section = re.search(rf"^#+ {rule['alert']}\n(.*?)(?=^#|\Z)", text, re.M | re.S)[1]
                for word in ("Means", "Look", "Do"):
                    self.assertIn(f"**{word}:**", section)

    def test_no_runbook_without_its_alert(self):
        headings = set(re.findall(r"^#+ (Lmhead\w+)$", OPERATING.read_text(), re.M))
        self.assertEqual({rule["alert"] for rule in rules("alert")}, headings)


def without_suffix(name):
    """Of the series of a histogram or summary."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def explained_metrics():
    text = OPERATING.read_text()
    section = text[text.index("\n## Metrics\n"):]
    return set(re.findall(r"`((?:lmhead|process)_\w+)", section[:section.index("\n## ", 1)]))


def literals(folder):
    """All string literals of a folder's sources, those that follow each other joined as the compiler does it."""
    text = ""
    for file in sorted(folder.rglob("*.cc")):
        joined = re.sub(r'"\s*\n\s*"', "", file.read_text())
        text += "\n".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)) + "\n"
    return text


class Runbooks(unittest.TestCase):
    def test_messages_that_are_quoted_are_the_server_s(self):
        """Who searches for a message that the log shows has to find it, and the other way round."""
        text = OPERATING.read_text()
        alerts = text[text.index("\n## Alerts\n"):]
        known = literals(chart.ROOT / "server") + literals(chart.ROOT / "proto")
        checked = 0
        for quoted in re.findall(r"`([^`]+)`", alerts):
            if quoted.count(" ") < 3 or quoted.startswith(("lmhead ", "kubectl", "nvidia-smi")):
                continue
            # What the server puts in: numbers, durations, and the names that the examples use.
            for piece in re.split(r"…|\bstep \d+ of head lm\b|\b\d+[mhs]?\b|\blm\b|\bw\d\b", quoted.replace("\n", " ")):
                piece = piece.strip(" ,:;()")
                if len(piece) >= 12:
                    checked += 1
                    self.assertTrue(piece in known, f"no message has '{piece}', which is quoted in `{quoted}`")
        self.assertGreater(checked, 10)


class Shape(unittest.TestCase):
    def setUp(self):
        self.dashboard = dashboard.load()

    def test_imports_anywhere(self):
        self.assertNotIn("id", self.dashboard)
        self.assertEqual("lmhead", self.dashboard["uid"])
        self.assertGreaterEqual(self.dashboard["schemaVersion"], 36)
        ids = [panel["id"] for panel in self.dashboard["panels"]]
        self.assertEqual(len(ids), len(set(ids)))

    def test_peak_memory_comes_first(self):
        first, second = self.dashboard["panels"][:2]
        self.assertEqual(("row", "Peak memory"), (first["type"], first["title"]))
        self.assertIn("lmhead_memory_total_peak_bytes", second["targets"][0]["expr"])

    def test_every_panel_says_what_it_shows(self):
        for panel in dashboard.panels(self.dashboard):
            with self.subTest(panel["title"]):
                self.assertGreater(len(panel["description"]), 10)
                self.assertIn("unit", panel["fieldConfig"]["defaults"])
                self.assertEqual(dashboard.DATASOURCE, panel["datasource"])

    def test_every_query_follows_the_variables(self):
        for title, target in dashboard.queries(self.dashboard):
            with self.subTest(title, expr=target["expr"]):
                selectors = re.findall(r"(?:lmhead|process)_\w+(\{[^}]*\})?", target["expr"])
                self.assertTrue(selectors)
                for selector in selectors:
                    for part in ('job="lmhead"', 'namespace=~"$namespace"', 'pod=~"$pod"'):
                        self.assertIn(part, selector)
                for window in re.findall(r"\[([^\]]*)\]", target["expr"]):
                    self.assertIn(window, ("$__rate_interval", "$__range", "30m"))
                self.assertNotRegex(target["expr"], r"_total\{[^}]*\}(?!\[)")

    def test_pods_of_one_name_in_two_namespaces_are_two(self):
        """Every release's first pod is called lmhead-0."""
        for title, target in dashboard.queries(self.dashboard):
            with self.subTest(title, expr=target["expr"]):
                for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", target["expr"]):
                    self.assertEqual("pod" in labels.split(", "), "namespace" in labels.split(", "))
                legend = target.get("legendFormat", "")
                self.assertEqual("{{pod}}" in legend, "{{namespace}}" in legend)

    def test_every_metric_is_explained(self):
        explained = explained_metrics()
        expressions = [target["expr"] for _, target in dashboard.queries(self.dashboard)] + [rule["expr"] for rule in rules("expr")]
        for expression in expressions:
            for name in re.findall(r"(?<![\w:])(?:lmhead|process)_\w+", expression):
                self.assertIn(without_suffix(name), explained)

    def test_panels_lie_in_the_grid_and_not_over_each_other(self):
        taken = {}
        for panel in self.dashboard["panels"]:
            place = panel["gridPos"]
            self.assertLessEqual(place["x"] + place["w"], 24, panel["title"])
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    self.assertNotIn((x, y), taken, f"{panel['title']} lies on {taken.get((x, y))}")
                    taken[x, y] = panel["title"]


class Scrape(unittest.TestCase):
    """Nothing here looks at how large a value is: only that a query which a person will look at has an answer."""

    @classmethod
    def setUpClass(cls):
        cls.stack = Stack()
        cls.addClassCleanup(cls.stack.__exit__)
        cls.stack.__enter__()
        cls.stack.load(LOAD_SECONDS)

    def expression(self, text):
        return dashboard.interpolate(text, rate_interval="8s", time_range=f"{2 * LOAD_SECONDS}s")

    def test_every_query_of_the_dashboard_has_data(self):
        for title, target in dashboard.queries(dashboard.load()):
            with self.subTest(title, expr=target["expr"]):
                expression = self.expression(target["expr"])
                if target.get("instant"):
                    self.assertTrue(self.stack.query(expression))
                else:
                    self.assertTrue(self.stack.query_range(expression, LOAD_SECONDS))

    def test_steps_and_checkpoints_leave_their_figures(self):
        for expression in ("max_over_time(lmhead_dense_logits_bytes[1m]) > 0", "lmhead_checkpoints_total{outcome='saved'} > 0",
                           "lmhead_checkpoint_seconds_count > 0", "max_over_time(lmhead_last_checkpoint_timestamp_seconds[1m]) > 1e9",
                           "lmhead_group_ready == 1"):
            self.assertTrue(self.stack.query(expression), expression)

    def test_legends_name_labels_that_are_there(self):
        for title, target in dashboard.queries(dashboard.load()):
            with self.subTest(title):
                for labels, _ in self.stack.query_range(self.expression(target["expr"]), LOAD_SECONDS):
                    for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                        self.assertIn(label, labels)

    def test_variables_offer_what_is_there(self):
        for variable in dashboard.load()["templating"]["list"]:
            if variable["type"] == "query":
                selector, label = re.match(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
                found = {labels[label] for labels, _ in self.stack.query(self.expression(selector))}
                self.assertEqual({LABELS[variable["name"]]}, found)

    def test_every_recording_rule_has_data(self):
        for rule in rules("record"):
            with self.subTest(rule["record"]):
                self.assertTrue(self.stack.query_range(rule["record"], LOAD_SECONDS))

    def test_the_manual_explains_what_there_is_and_nothing_else(self):
        names = {without_suffix(name) for name in self.stack.metric_names() if re.match("(lmhead|process)_", name)}
        self.assertEqual(names, explained_metrics())

    def test_every_metric_that_an_alert_reads_is_there(self):
        names = self.stack.metric_names()
        for rule in rules("alert"):
            for name in re.findall(r"(?:lmhead_|\w+:lmhead_)[\w:]+", rule["expr"]):
                self.assertIn(name, names, rule["alert"])

    def test_no_alert_fires_on_a_server_that_is_well(self):
        firing = [a["labels"]["alertname"] for a in self.stack.get("alerts")["alerts"] if a["state"] == "firing"]
        self.assertEqual([], firing)


if __name__ == "__main__":
    unittest.main()
