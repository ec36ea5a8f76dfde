#!/bin/sh
# Hydra 1.4 does not compose an optional entry of a defaults list that interpolates a group whose choice is null.
#
# hydra-core 1.4.0rc3, omegaconf 2.4.1rc1, beside hydra-core 1.3.8, omegaconf 2.3.1; Python 3.11; 2026-11-29. A user's config:
#   defaults: [_self_, {scale: tiny}, {db: null}, {optional tuned: "${scale}_${db}"}]
#
# null is how Hydra documents that a group has no choice yet, and `optional` that a file need not exist: one would guess that
# without a db the entry means no file, as in Hydra 1.3, which looks for tiny_None. 1.4 ends with exit 1, and its message lists
# db among the keys that can be interpolated. `db=postgres` composes with both.
#
# Seen (version, override, exit code, last line):
#   1.3.8 none: 0 {'scale': {}}
#   1.3.8 db=postgres: 0 {'scale': {}, 'db': {'port': 5432}}
#   1.4.0rc3 none: 1 Error resolving interpolation '${scale}_${db}', possible interpolation keys: db, scale
#   1.4.0rc3 db=postgres: 0 {'scale': {}, 'db': {'port': 5432}}
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/conf/db" "$folder/conf/scale"
echo 'port: 5432' >"$folder/conf/db/postgres.yaml"
echo '{}' >"$folder/conf/scale/tiny.yaml"
cat >"$folder/conf/config.yaml" <<'YAML'
defaults: [_self_, {scale: tiny}, {db: null}, {optional tuned: "${scale}_${db}"}]
YAML
cat >"$folder/app.py" <<'PYTHON'
import sys

import hydra

told = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
with hydra.initialize_config_dir(sys.argv[1], **told):
    try:
        print(hydra.compose("config", overrides=sys.argv[2:]))
    except Exception as error:
        print(" ".join(str(error).partition("hydra/")[0].split()).rstrip(","))
        sys.exit(1)
PYTHON
for versions in '1.3.8 2.3.1' '1.4.0rc3 2.4.1rc1'; do
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet "hydra-core==${versions% *}" "omegaconf==${versions#* }"
    for override in none db=postgres; do
        code=0
        words=$override
        [ "$override" != none ] || words=
        # shellcheck disable=SC2086
        said=$("$folder/venv/bin/python" "$folder/app.py" "$folder/conf" $words) || code=$?
        echo "${versions% *} $override: $code $said"
    done
done | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
1.3.8 none: 0 {'scale': {}}
1.3.8 db=postgres: 0 {'scale': {}, 'db': {'port': 5432}}
1.4.0rc3 none: 1 Error resolving interpolation '${scale}_${db}', possible interpolation keys: db, scale
1.4.0rc3 db=postgres: 0 {'scale': {}, 'db': {'port': 5432}}
SEEN
cmp "$folder/seen" "$folder/expected"
