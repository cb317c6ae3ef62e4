#!/usr/bin/env bash
# Known vulnerabilities of the locked packages, by pip-audit, which asks the database of the Python Package Index. The
# first argument is our environment. Where the database cannot be had, it says so.
set -euo pipefail
cd "$(dirname "$0")/.."

. scripts/own_venv.sh

if ! audit=$(own_venv "$1" pip-audit 2.10.1); then
    echo "audit: pip could not fetch pip-audit, so vulnerabilities are SKIPPED"
    exit 0
fi
found=0
for lock in docker/locks/*.txt; do
    said=$("$audit/bin/pip-audit" --progress-spinner off --require-hashes --disable-pip --desc off -r "$lock" 2>&1) && clean=1 || clean=0
    if grep -q "could not be audited\|ConnectionError" <<<"$said"; then
        echo "audit: the database of vulnerabilities cannot be had, so $lock is SKIPPED"
    elif [ "$clean" = 1 ]; then
        echo "audit: $lock has no known vulnerability"
    else
        echo "$said"
        found=1
    fi
done
exit $found
