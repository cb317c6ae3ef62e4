#!/usr/bin/env bash
# Known vulnerabilities of the locked packages, by pip-audit, which asks the database of the Python Package Index. It has
# an environment of its own in that of the first argument. Where the database cannot be had, it says so.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
version=2.10.1
audit="$venv/pip-audit/$version"

if [ ! -x "$audit/bin/pip-audit" ]; then
    "$venv/bin/python" -m venv "$audit"
    if ! "$audit/bin/python" -m pip --disable-pip-version-check install -qq "pip-audit==$version"; then
        rm -r "$audit"
        echo "audit: pip could not fetch pip-audit, so vulnerabilities are SKIPPED"
        exit 0
    fi
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
