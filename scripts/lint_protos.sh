#!/usr/bin/env bash
# Lint the .proto files with buf, fetched once with npm into the directory given as the first argument, and compare them
# with those of the last version that has a tag: what a peer of that version sends must still be understood.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$1
version=1.75.0
buf="$prefix/$version/node_modules/.bin/buf"

if [ ! -x "$buf" ]; then
    if ! command -v npm >/dev/null; then
        echo "lint: npm is not here, so buf lint of the .proto files is SKIPPED"
        exit 0
    fi
    if ! npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$prefix/$version" "@bufbuild/buf@$version"; then
        echo "lint: npm could not fetch buf, so buf lint of the .proto files is SKIPPED"
        exit 0
    fi
fi
"$buf" lint protos
echo "buf lint: protos are clean"
if tag=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null); then
    "$buf" breaking protos --against ".git#tag=$tag,subdir=protos"
    echo "buf breaking: nothing is broken since $tag"
else
    echo "buf breaking: no version has a tag yet, so there is nothing to compare with"
fi
