#!/usr/bin/env bash
# Known vulnerabilities of the locked packages and of torch, by pip-audit, which asks the database of the Python Package
# Index. The first argument is our environment. Where the database cannot be had, or lacks a package, it says so.
set -euo pipefail
cd "$(dirname "$0")/.."

. scripts/own_venv.sh

if ! audit=$(own_venv "$1" pip-audit 2.10.1); then
    echo "audit: pip could not fetch pip-audit, so vulnerabilities are SKIPPED"
    exit 0
fi
found=0

# look_up WHAT OPTIONS...: say what pip-audit finds.
look_up() {
    local what="$1" said clean
    shift
    said=$("$audit/bin/pip-audit" --progress-spinner off --disable-pip --desc off "$@" 2>&1) && clean=1 || clean=0
    if grep -q "ConnectionError" <<<"$said"; then
        echo "audit: the database of vulnerabilities cannot be had, so $what is SKIPPED"
    elif [ "$clean" = 0 ]; then
        echo "$said"
        found=1
    elif grep -q "could not be audited" <<<"$said"; then
        echo "audit: the database lacks $(grep -c "could not be audited" <<<"$said") packages of $what, which are SKIPPED"
    else
        echo "audit: $what has no known vulnerability"
    fi
}

for lock in docker/locks/*.txt; do
    look_up "$lock" --require-hashes -r "$lock"
done
# In no lock.
torch=$(sed -n 's/^ARG TORCH_VERSION=/torch==/p' docker/*.Dockerfile | sort -u)
look_up "$torch" --no-deps -r <(echo "$torch")
exit $found
