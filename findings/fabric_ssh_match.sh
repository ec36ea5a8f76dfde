#!/bin/sh
# What fabric reads from a Match block of ~/.ssh/config is not what ssh reads there.
#
# fabric 3.2.3, paramiko 5.1.0, Python 3.11, beside OpenSSH's ssh_config(5); 2026-11-28. `Connection("10.0.0.5", user="tpu")` with a
# gateway in a block of each of these kinds, for a local user of another name.
#
# One would guess that `Match user tpu` applies, since that is the user of the connection, and that a criterion which paramiko
# does not know is an error, as `Match final all` and `Match host=10.*` are. `Match user` is compared with the local user's name
# where no `User` stands before it: a lookup does not learn of the connection's user. A criterion that is not known
# is left out of the comparison: the block applies to every host, and the connection goes through its gateway.
#
# Seen (block, fabric's gateway, what ssh_config(5) says):
#   Match user tpu: no gateway; ssh -l tpu takes it
#   Match localnetwork 192.0.2.0/24: gateway; ssh takes it in that network only
#   Match tagged work: gateway; ssh takes it with -P work only
#   Match host 10.0.0.9: no gateway; ssh takes it for that host only
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet fabric==3.2.3 paramiko==5.1.0
cat >"$folder/read.py" <<'PYTHON'
import sys

from fabric import Config, Connection

BLOCKS = {
    "Match user tpu": "ssh -l tpu takes it",
    "Match localnetwork 192.0.2.0/24": "ssh takes it in that network only",
    "Match tagged work": "ssh takes it with -P work only",
    "Match host 10.0.0.9": "ssh takes it for that host only",
}
for block, told in BLOCKS.items():
    with open(sys.argv[1], "w") as file:
        file.write(f"{block}\n    ProxyJump gateway.example.com\n")
    connection = Connection("10.0.0.5", user="tpu", config=Config(runtime_ssh_path=sys.argv[1]))
    print(f"{block}: {'gateway' if connection.gateway else 'no gateway'}; {told}")
PYTHON
LOGNAME=someone "$folder/venv/bin/python" "$folder/read.py" "$folder/config" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
Match user tpu: no gateway; ssh -l tpu takes it
Match localnetwork 192.0.2.0/24: gateway; ssh takes it in that network only
Match tagged work: gateway; ssh takes it with -P work only
Match host 10.0.0.9: no gateway; ssh takes it for that host only
SEEN
cmp "$folder/seen" "$folder/expected"
