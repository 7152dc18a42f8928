#!/usr/bin/env bash
# Start one training on several hosts over ssh, or look first whether they are fit for it. Paths are those of the
# hosts, from the root of the repository:
#
#   cluster/launch_cluster.sh hosts.txt --install                                     copy and install all on each host
#   cluster/launch_cluster.sh hosts.txt --check                                         look at each host only
#   cluster/launch_cluster.sh hosts.txt -- cluster/train_distributed.py --epochs 3      start it on all hosts
#   cluster/launch_cluster.sh hosts.txt --check -- step9_heterogeneous_pp/train.py      start it if all is well
#   cluster/launch_cluster.sh --elastic 2:3 hosts.txt -- cluster/train_distributed.py   go on when a host is lost
#   cluster/launch_cluster.sh hosts.txt --detach -- cluster/train_distributed.py        outlive this machine
#   cluster/launch_cluster.sh hosts.txt --attach                                        and look at it from any other
#
# The work is done in Python (hosts/), where no word of hosts.txt or of the arguments is ever read by a shell.
# PYTHON=/path/to/python names the Python of this machine, if it is not python3. It needs no torch.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if ! command -v -- "$python" >/dev/null; then
    echo "error: no $python on this machine: install Python 3.10 to 3.14, or set PYTHON to its path" >&2
    exit 2
fi
exec "$python" "$here/hosts/launch_cluster.py" "$@"
