"""Prometheus' own tool reads every expression of the chart, and says when each alert fires."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import values_of
from tests.chart.test_monitoring import PANELS, alerts

pytestmark = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool (Debian: prometheus)")

TLS = {"enabled": True, **{part: {"issuerRef": {"name": "ours"}} for part in ("public", "internal")}}
FRONT = '{namespace="models", service="copse-orchestrator-headless"}'
BACK = '{namespace="models", service="copse-verifier"}'
LATE = '{namespace="models", service="copse-verifier", arrival="late"}'
DAY = 24 * 60
# Of each alert: series by name and labels with their values, a minute apart, with which it must fire and must not, and
# the minutes after which to look.
ALERTS: dict[str, tuple[dict[str, str], dict[str, str], int]] = {
    "CoppiceQueue": (
        {f"coppice_orchestrator_num_requests_waiting{FRONT}": "40x60"},
        {f"coppice_orchestrator_num_requests_waiting{FRONT}": "40x3 0x60"},
        30,
    ),
    "CoppiceRefusals": (
        {
            f"coppice_orchestrator_requests_refused_total{FRONT}": "0+2x60",
            f"coppice_orchestrator_requests_total{FRONT}": "0+100x60",
        },
        {
            f"coppice_orchestrator_requests_refused_total{FRONT}": "0+0.5x60",
            f"coppice_orchestrator_requests_total{FRONT}": "0+100x60",
        },
        30,
    ),
    "CoppiceLateDrafts": (
        {f"coppice_verifier_drafts_total{LATE}": "0+40x60", f"coppice_verifier_drafts_total{BACK}": "0+60x60"},
        {f"coppice_verifier_drafts_total{LATE}": "0+20x60", f"coppice_verifier_drafts_total{BACK}": "0+80x60"},
        40,
    ),
    "CoppiceNearTies": (
        {
            f"coppice_verifier_near_ties_total{BACK}": "0+3x200",
            f"coppice_verifier_committed_tokens_total{BACK}": "0+100x200",
        },
        {
            f"coppice_verifier_near_ties_total{BACK}": "0+1x200",
            f"coppice_verifier_committed_tokens_total{BACK}": "0+100x200",
        },
        150,
    ),
    "CoppiceKvPressure": (
        {f"coppice_verifier_preemptions_total{BACK}": "0+60x60"},
        {f"coppice_verifier_preemptions_total{BACK}": "0+20x60"},
        30,
    ),
    # Without an orchestrator nobody tells of drafters.
    "CoppiceNoDrafter": ({}, {f"coppice_orchestrator_drafters_connected{FRONT}": "1x60"}, 30),
    "CoppiceRedisAway": (
        {
            f"coppice_orchestrator_prefix_cache_errors_total{FRONT}": "0+1x60",
            f"coppice_orchestrator_prefix_cache_skipped_total{FRONT}": "0x60",
        },
        {
            f"coppice_orchestrator_prefix_cache_errors_total{FRONT}": "0x60",
            f"coppice_orchestrator_prefix_cache_skipped_total{FRONT}": "0x60",
        },
        30,
    ),
    "CoppiceAcceptanceDropped": (
        {
            f"coppice_verifier_spec_decode_num_accepted_tokens_total{BACK}": f"0+100x{DAY} {100 * DAY}+50x200",
            f"coppice_verifier_spec_decode_num_drafts_total{BACK}": f"0+50x{DAY + 200}",
        },
        {
            f"coppice_verifier_spec_decode_num_accepted_tokens_total{BACK}": f"0+100x{DAY} {100 * DAY}+90x200",
            f"coppice_verifier_spec_decode_num_drafts_total{BACK}": f"0+50x{DAY + 200}",
        },
        DAY + 90,
    ),
    # The clock begins at 0; the limit is 14 days.
    "CoppiceCertificateExpires": (
        {f"coppice_verifier_certificate_expiry_timestamp_seconds{BACK}": "1200000x60"},
        {f"coppice_verifier_certificate_expiry_timestamp_seconds{BACK}": "1300000x60"},
        30,
    ),
}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_every_expression_is_one(tmp_path: Path) -> None:
    rules = [{"alert": name, "expr": alert["expr"]} for name, alert in everything().items()]
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules += [{"record": f"panel_{number}", "expr": expr} for number, expr in enumerate(shown)]
    assert len(rules) > len(ALERTS) + 32
    promtool("check", "rules", write(tmp_path / "rules.yml", {"groups": [{"name": "all", "rules": rules}]}))


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    told = ("alert", "expr", "for")
    rules = [{key: alert[key] for key in told if key in alert} for alert in everything().values()]
    assert ALERTS.keys() == {rule["alert"] for rule in rules}
    write(tmp_path / "rules.yml", {"groups": [{"name": "all", "rules": rules}]})
    tests = [
        {
            "name": f"{name} {'fires' if fires else 'does not fire'}",
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "alert_rule_test": [
                {"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": [{"exp_labels": {}}] if fires else []}
            ],
        }
        for name, (sick, well, minutes) in ALERTS.items()
        for fires, series in ((True, sick), (False, well))
    ]
    cases = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    promtool("test", "rules", write(tmp_path / "tests.yml", cases))


def everything() -> dict[str, dict[str, Any]]:
    return alerts({**values_of("everything"), "tls": TLS})
