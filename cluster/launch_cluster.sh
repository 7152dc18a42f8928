#!/usr/bin/env bash
# Start one training on several hosts over ssh, or look first whether they are fit for it.
#
#   ./launch_cluster.sh hosts.txt --check                                  look at each host, start nothing
#   ./launch_cluster.sh hosts.txt -- train_distributed.py --epochs 3       start it on all hosts
#   ./launch_cluster.sh hosts.txt --check -- train_distributed.py          look, and start it if all is well
#
# The work is done in Python, where no word of hosts.txt or of the arguments ever is a word of a shell's:
#   launch_cluster.py   reads hosts.txt, starts, streams and ends the hosts' runs
#   check_cluster.py    asks the hosts and prints the table of --check
#   host_run.py         runs on each host: starts torchrun there, and ends it when this terminal is gone
#   host_facts.py       runs on each host: answers --check
#
# PYTHON=/path/to/python names the Python of this machine, if it is not python3. It needs no torch.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if ! command -v -- "$python" >/dev/null; then
    echo "error: no $python on this machine: install Python 3.10 or later, or set PYTHON to its path" >&2
    exit 2
fi
exec "$python" "$here/launching/launch_cluster.py" "$@"
