#!/usr/bin/env bash
# Runs a script as a process of mpirun, with the variables that torchrun would set:
#
#   mpirun -n 4 cluster/engines/mpi_rank.sh step8_pipeline_parallel_1f1b/train.py --pp_size 4
#
# Open MPI and MPICH number the processes under names of their own. On several hosts, give all processes MASTER_ADDR, the
# first host's name: mpirun -x MASTER_ADDR=node0 (Open MPI), mpirun -genv MASTER_ADDR node0 (MPICH).
set -euo pipefail
if [[ ${1:-} == --help ]]; then
    sed -n '2,$s/^# \{0,1\}//p' "$0"
    exit
fi
export RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}} WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-}}
export LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-}}
export LOCAL_WORLD_SIZE=${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-}}
if [[ -z $RANK || -z $WORLD_SIZE || -z $LOCAL_RANK || -z $LOCAL_WORLD_SIZE ]]; then
    echo "error: neither Open MPI nor MPICH has numbered this process: mpirun -n 4 $0 ${*:-SCRIPT}" >&2
    exit 2
elif [[ $LOCAL_WORLD_SIZE != "$WORLD_SIZE" && -z ${MASTER_ADDR:-} ]]; then
    echo "error: mpirun has started processes on several hosts: give them MASTER_ADDR, the first host's name" >&2
    exit 2
fi
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
exec "${PYTHON:-python3}" "$@"
