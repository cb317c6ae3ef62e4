# shellcheck shell=bash
# own_venv VENV PACKAGE VERSION: print a directory in VENV with an environment of the package's own, since what it brings
# would change ours. Fails where pip cannot fetch it.
own_venv() {
    local own="$1/$2/$3"
    if [ ! -x "$own/bin/$2" ]; then
        "$1/bin/python" -m venv "$own"
        if ! "$own/bin/python" -m pip --disable-pip-version-check install -qq "$2==$3" >&2; then
            rm -r "$own"
            return 1
        fi
    fi
    echo "$own"
}
