#!/usr/bin/env bash
# Check what the chart renders, and the Dockerfiles, against checkov's policies (.checkov.yaml says which are not kept).
# The first argument is our environment.
set -euo pipefail
cd "$(dirname "$0")/.."

. scripts/own_venv.sh

venv=$1
if ! checkov=$(own_venv "$venv" checkov 3.3.30); then
    echo "chart: pip could not fetch checkov, so policies are SKIPPED"
    exit 0
fi
check() { # framework, directory; it is not to ask its maker's server for anything
    "$checkov/bin/checkov" --config-file .checkov.yaml --skip-download --quiet --compact --framework "$1" -d "$2"
}
check dockerfile docker
if ! "$venv/bin/python" -c "import helm_python" 2>/dev/null; then
    echo "chart: Helm cannot be had here, so policies of what it renders are SKIPPED"
    exit 0
fi
rendered=$(mktemp -d)
trap 'rm -r "$rendered"' EXIT
"$venv/bin/python" -m tests.chart.write_profiles "$rendered"
check kubernetes "$rendered"
echo "checkov: no policy is broken"
