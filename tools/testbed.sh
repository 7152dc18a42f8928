#!/usr/bin/env bash
# Three machines on one: node0, node1 and node2, each with its own host name, network, disk, speed and sshd. Needs root.
#
#   tools/testbed.sh up                      three hosts on a switch of their own; a bed that is up stays as it is
#   tools/testbed.sh exec node1 COMMAND...   runs COMMAND on node1, from this directory and with this environment
#   tools/testbed.sh rate node1 10mbit       node1's cable, in each direction; `all` for all hosts, `off` for no limit
#   tools/testbed.sh slow node1 50           node1 computes with 50 % of one core, in sum over all cores (it is not
#                                            pinned to one: taskset does that); `all`, `off` as above
#   tools/testbed.sh memory node1 900        node1 has 900 MB of memory: more, and the kernel ends a process; `all`, `off`
#   tools/testbed.sh cut node1               pulls the cable of node1; `join node1` plugs it in again
#   tools/testbed.sh own DIR...              from now on each host has a copy of DIR, at the same path, on its own disk
#   tools/testbed.sh wipe node1              node1 has a new disk: what was written there is gone
#   tools/testbed.sh show                    name=, network=, ssh_config= and disks= of this bed
#   tools/testbed.sh down                    ends what runs in the hosts and leaves nothing of them behind
#
#         switch (a bridge) ------ this machine, NETWORK.1
#        /       |        \
#     node0    node1     node2                 each: namespaces, eth0, /etc/hosts, cgroup, sshd on ports 22 and 2222
#  NETWORK.10   .11       .12
#
# A host's disk holds runs/, checkpoints/ and logs/ of the repository and ~root/.cache, which are empty at `up`, and the
# directories given to `own`. This machine sees the disk of node1 in DISKS/node1, under the same paths. Whatever a host
# writes elsewhere goes to the disk of this machine, which all hosts see: so code that is changed needs no copying. A
# directory of node1 that is soon full: `exec node1 mount -t tmpfs -o size=1m none checkpoints`, until `wipe node1`.
# The hosts share the clock and, but for `memory`, the memory of this machine; all else is as between three machines.
# `ssh node1` works from each of them, and from this machine as `ssh -F SSH_CONFIG node1`. Each copy of this repository
# has a bed of its own, with a name and a network made of its path or, where the variable is set, of $TESTBED. Exit code
# 2: this machine cannot do it (or nobody can: the usage); 1: it went wrong; `exec` ends with the code of COMMAND.
set -eEuo pipefail
trap 'fail 1 "\"$BASH_COMMAND\" in line $LINENO ended with code $?"' ERR
PATH=$PATH:/usr/sbin:/sbin

nodes=(node0 node1 node2)
root=$(cd -- "$(dirname -- "$0")/.." && pwd -P)
number=$(cksum <<<"${TESTBED:-$root}")
number=${number%% *}
bed=testbed-$(printf %06x $((number % 0x1000000)))  # prefix of the namespaces, name of the cgroup and of this machine's
state=/run/$bed                                     # end of the cable; keys and configuration of ssh, namespaces
disks=/var/tmp/$bed
empty=("$root"/{runs,checkpoints,logs} ~root/.cache)  # directories of a new disk
network=198.$((18 + number / 256 % 2)).$((number % 256))  # RFC 2544 keeps 198.18/15 for tests: no LAN has it
period_us=10000              # a quota counts per 10 ms: with the usual 100 ms, a short operation is slowed fully or not

fail() { echo "testbed.sh: error: ${*:2}" >&2; exit "$1"; }  # CODE MESSAGE...

address() { echo "$network.$((10 + ${1#node}))"; }

require_node() {  # NODE...: hosts of a bed that is up
    local node
    for node in "$@"; do
        [[ " ${nodes[*]} " == *" $node "* ]] || fail 2 "no host '$node': the hosts are ${nodes[*]}"
        [[ -e /run/netns/$bed-$node ]] || fail 1 "$node is down: start the hosts with $0 up"
    done
}

require_machine() {  # root, the programs, namespaces
    ((EUID == 0)) || fail 2 "network namespaces need root: run it as root, or with sudo"
    local program missing=()
    for program in ip tc unshare flock hostname ssh ssh-keygen sshd; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    ((${#missing[@]} == 0)) || fail 2 "no ${missing[*]} here: apt-get install -y --no-install-recommends" \
        "iproute2 util-linux hostname openssh-client openssh-server"
    unshare --net --uts --mount true 2>/dev/null || fail 2 "this machine allows no namespaces (a container?): try a" \
        "virtual machine, or a container with --privileged"
}

# --- cgroups: version 1 has a directory tree per controller, version 2 one for all -----------------------------------

# Sets cgroup to the directory of the hosts' cgroups (empty: there is no cpu controller), memory_cgroup to that of the
# memory controller, and version to 1 or 2.
find_cgroup() {
    cgroup="" memory_cgroup="" version=1
    local _ directory kind options
    while read -r _ directory kind options _; do
        if [[ $kind == cgroup && ",$options," == *,cpu,* ]]; then
            cgroup=$directory/$bed version=1
        elif [[ $kind == cgroup && ",$options," == *,memory,* ]]; then
            memory_cgroup=$directory/$bed
        elif [[ $kind == cgroup2 && " $(cat "$directory/cgroup.controllers") " == *" cpu "* ]]; then
            cgroup=$directory/$bed version=2
            [[ " $(cat "$directory/cgroup.controllers") " != *" memory "* ]] || memory_cgroup=$cgroup
        fi
    done </proc/mounts
}

make_cgroups() {
    [[ $cgroup ]] || return 0
    mkdir -p "${nodes[@]/#/$cgroup/}"
    [[ ! $memory_cgroup ]] || mkdir -p "${nodes[@]/#/$memory_cgroup/}"
    if ((version == 2)); then  # a cgroup has a controller only if its parent passes it on
        local controllers=+cpu
        [[ ! $memory_cgroup ]] || controllers="+cpu +memory"
        echo "$controllers" >"${cgroup%/*}/cgroup.subtree_control"
        echo "$controllers" >"$cgroup/cgroup.subtree_control"
        rmdir "${nodes[@]/#/$cgroup/}" && mkdir "${nodes[@]/#/$cgroup/}"
    fi
}

slow() {  # NODE PERCENT|off
    [[ -d $cgroup/$1 ]] || fail 2 "no cgroup with a cpu controller on this machine: cannot slow $1"
    local period=$period_us quota=-1
    if [[ $2 != off ]]; then
        [[ $2 =~ ^[1-9][0-9]{0,3}$ ]] || fail 2 "slow $1 $2: give a whole number of percent of one core, as 50, or off"
        ((period * $2 / 100 >= 1000)) || period=$((100000 / $2 + 1))  # the kernel takes no quota under 1 ms
        quota=$((period * $2 / 100))
    fi
    if ((version == 2)); then
        echo "${quota/#-1/max} $period" >"$cgroup/$1/cpu.max"
    else
        echo -1 >"$cgroup/$1/cpu.cfs_quota_us"
        echo "$period" >"$cgroup/$1/cpu.cfs_period_us"
        echo "$quota" >"$cgroup/$1/cpu.cfs_quota_us"
    fi
}

memory() {  # NODE MB|off
    [[ -d $memory_cgroup/$1 ]] || fail 2 "no cgroup with a memory controller on this machine: cannot limit $1"
    local limit=-1
    if [[ $2 != off ]]; then
        [[ $2 =~ ^[1-9][0-9]{1,6}$ ]] || fail 2 "memory $1 $2: give a whole number of megabytes, as 900, or off"
        limit=${2}000000
    fi
    if ((version == 2)); then
        echo "${limit/#-1/max}" >"$memory_cgroup/$1/memory.max"
    else
        echo "$limit" >"$memory_cgroup/$1/memory.limit_in_bytes"
    fi
}

# --- network ---------------------------------------------------------------------------------------------------------

make_network() {
    local node
    [[ ! $(ip -o address show to "$network.0/24") ]] || fail 1 "another bed has the network $network.0/24: give this" \
        "one another name, TESTBED=anything $0 up"
    ip netns add "$bed-switch"
    # The bridge is in a namespace too: there no firewall of this machine (Docker's, say) sees what the hosts send.
    ip -n "$bed-switch" link add bridge type bridge
    ip -n "$bed-switch" link set bridge up
    ip link add "$bed" type veth peer name laptop netns "$bed-switch"
    ip -n "$bed-switch" link set laptop master bridge up
    ip address add "$network.1/24" dev "$bed"
    ip link set "$bed" up
    for node in "${nodes[@]}"; do
        ip netns add "$bed-$node"
        ip -n "$bed-switch" link add "$node" type veth peer name eth0 netns "$bed-$node"
        ip -n "$bed-switch" link set "$node" master bridge up
        ip -n "$bed-$node" address add "$(address "$node")/24" dev eth0
        ip -n "$bed-$node" link set lo up
        ip -n "$bed-$node" link set eth0 up
    done
}

rate() {  # NODE RATE|off: what node sends waits at its eth0, what it gets waits at the switch
    [[ $2 =~ ^([1-9][0-9]{0,8}[kmg]bit|off)$ ]] || fail 2 "rate $1 $2: give a rate as 10mbit, 500kbit or 1gbit, or off"
    tc -n "$bed-$1" qdisc del dev eth0 root 2>/dev/null || true
    tc -n "$bed-switch" qdisc del dev "$1" root 2>/dev/null || true
    [[ $2 != off ]] || return 0
    # A burst of one packet: what a larger one lets through at once, a short message, would cost nothing. The host's own
    # queue drops nothing, for a real card makes the sender wait; the queue of the switch is 0.4 s long.
    tc -n "$bed-$1" qdisc add dev eth0 root tbf rate "$2" burst 2kb limit 64mb
    tc -n "$bed-switch" qdisc add dev "$1" root tbf rate "$2" burst 2kb latency 400ms
}

# --- hosts -----------------------------------------------------------------------------------------------------------

# Files in /etc/netns/NAME/ take the place of those in /etc on that host, for `ip netns exec NAME` too.
make_files() {
    local node
    mkdir -p "$state"
    chmod 700 "$state"
    ssh-keygen -q -t ed25519 -N "" -C testbed -f "$state/id_ed25519"
    ssh-keygen -q -t ed25519 -N "" -C testbed -f "$state/host_key"
    echo "$bed $(cat "$state/host_key.pub")" >"$state/known_hosts"
    {
        for node in "${nodes[@]}"; do printf 'Host %s\n    HostName %s\n' "$node" "$(address "$node")"; done
        printf 'Host node*\n    User root\n    IdentityFile %s\n    IdentitiesOnly yes\n' "$state/id_ed25519"
        printf '    UserKnownHostsFile %s\n    HostKeyAlias %s\n' "$state/known_hosts" "$bed"
    } >"$state/ssh_config"
    # No PAM: it would move a session into a cgroup of its own, out of reach of `slow`.
    printf '%s\n' "Port 22" "Port 2222" "HostKey $state/host_key" "AuthorizedKeysFile $state/id_ed25519.pub" \
        "AuthenticationMethods publickey" "PermitRootLogin prohibit-password" "StrictModes no" "UsePAM no" \
        "PidFile none" "Subsystem sftp internal-sftp" >"$state/sshd_config"
    for node in "${nodes[@]}"; do
        mkdir -p "/etc/netns/$bed-$node/ssh"
        cp "$state/ssh_config" "/etc/netns/$bed-$node/ssh/ssh_config"
        (umask 077 && echo 'root:*:19000::::::' >"/etc/netns/$bed-$node/shadow")  # sshd refuses a locked root
        # No name server can be reached, and to wait for one takes half a minute of each torchrun's start.
        printf '%s: files\n' passwd group shadow hosts >"/etc/netns/$bed-$node/nsswitch.conf"
        {
            echo "127.0.0.1 localhost"
            for other in "${nodes[@]}"; do echo "$(address "$other") $other"; done
        } >"/etc/netns/$bed-$node/hosts"
    done
}

# A host's mount and UTS namespaces last from `up` to `down`, whoever runs in them: what one command mounts or writes on
# a host, the next one finds there. They are kept by files, on a mount that must not be shared.
make_namespaces() {
    local node cgroups=true
    if ((version == 1)) && [[ $memory_cgroup ]]; then  # programs ask it how much memory there is
        cgroups="mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir -p '${memory_cgroup%/*}' &&
            mount -t cgroup -o memory cgroup '${memory_cgroup%/*}'"
    elif ((version == 2)); then
        cgroups="mount -t cgroup2 cgroup '${cgroup%/*}'"
    fi
    mount --bind --make-private "$state" "$state"
    mkdir -p "${empty[@]}"  # these stay, as another bed may need them
    for node in "${nodes[@]}"; do
        touch "$state/$node.mount" "$state/$node.uts"
        unshare --mount="$state/$node.mount" --uts="$state/$node.uts" hostname "$node"
        # As `ip netns exec` does: /sys shows the network, and files in /etc/netns/NAME/ take the place of those in /etc.
        enter "$node" bash -c 'umount -l /sys; mount -t sysfs sysfs /sys; eval "$0" 2>/dev/null
            for file in "$1"/*; do mount --bind "$file" "/etc/${file##*/}" || exit; done' \
            "$cgroups" "/etc/netns/$bed-$node"
        wipe "$node"
    done
}

enter() { nsenter --mount="$state/$1.mount" --uts="$state/$1.uts" --net="/run/netns/$bed-$1" "${@:2}"; }

# --- disks -----------------------------------------------------------------------------------------------------------

place() {  # NODE DIR: DIR of the host is an empty directory on its own disk
    local place=$disks/$1$2
    mkdir -p "$place"
    find "$place" -mindepth 1 -delete
    enter "$1" bash -c '[[ $0 -ef $1 ]] || { umount -l "$1" 2>/dev/null; [[ $0 -ef $1 ]]; } || mount --bind "$0" "$1"' \
        "$place" "$2"
}

copy() {  # NODE DIR
    place "$@"
    [[ ! -d $2 ]] || cp -a "$2/." "$disks/$1$2"
}

own() {  # DIR...
    local node dir
    for dir in "$@"; do
        [[ -d $dir ]] || fail 2 "own $dir: no such directory on this machine"
        dir=$(realpath -- "$dir")
        grep -qxFs -- "$dir" "$state/own" || echo "$dir" >>"$state/own"
        for node in "${nodes[@]}"; do copy "$node" "$dir"; done
    done
}

wipe() {  # NODE
    local dir
    for dir in "${empty[@]}"; do place "$1" "$dir"; done
    [[ ! -e $state/own ]] || while read -r dir; do copy "$1" "$dir"; done <"$state/own"
}

# Becomes COMMAND on that host. The cgroups first: the namespace hides their directories.
run_in() {  # NODE COMMAND...
    local node=$1 directory
    shift
    for directory in "$cgroup" "$memory_cgroup"; do
        [[ ! -d $directory/$node ]] || echo "$BASHPID" >"$directory/$node/cgroup.procs"
    done
    exec nsenter --mount="$state/$node.mount" --uts="$state/$node.uts" --net="/run/netns/$bed-$node" \
        bash -c 'cd -- "$0" && exec "$@"' "$PWD" "$@"
}

start_sshd() {
    local node attempt
    [[ -d /run/sshd ]] || { mkdir /run/sshd && touch /run/sshd/of_testbed; }
    for node in "${nodes[@]}"; do
        (run_in "$node" "$(command -v sshd)" -f "$state/sshd_config" -E "$state/$node.log") 9<&-
    done
    for node in "${nodes[@]}"; do
        for attempt in {1..50}; do
            (exec 3<>"/dev/tcp/$(address "$node")/22") 2>/dev/null && continue 2
            sleep 0.1
        done
        fail 1 "the sshd of $node does not answer: $(tail -n 1 "$state/$node.log")"
    done
}

is_up() {
    local node
    [[ -e $state/up ]] || return 1
    for node in "${nodes[@]}"; do
        [[ -e /run/netns/$bed-$node ]] || return 1
        (exec 3<>"/dev/tcp/$(address "$node")/22") 2>/dev/null || return 1
    done
}

processes() {  # of all hosts, by namespace and by cgroup
    local node
    for node in "${nodes[@]}"; do
        ip netns pids "$bed-$node" 2>/dev/null || true
        cat "$cgroup/$node/cgroup.procs" 2>/dev/null || true
    done
}

down() {
    local node attempt pids
    for attempt in {1..50}; do  # again: what was killed may just have started something
        pids=$(processes)
        [[ $pids ]] || break
        kill -KILL $pids 2>/dev/null || true
        sleep 0.1
    done
    [[ ! $pids ]] || fail 1 "these processes do not end:" $pids
    ip link del "$bed" 2>/dev/null || true
    for node in "${nodes[@]}" switch; do
        [[ ! -e /run/netns/$bed-$node ]] || ip netns del "$bed-$node"
        rm -rf "/etc/netns/${bed:?}-$node"
    done
    rmdir /etc/netns 2>/dev/null || true
    [[ ! -d $cgroup ]] || rmdir "${nodes[@]/#/$cgroup/}" "$cgroup"
    [[ ! -d $memory_cgroup ]] || rmdir "${nodes[@]/#/$memory_cgroup/}" "$memory_cgroup"
    ! mountpoint -q "$state" || umount -R "$state"
    rm -rf "$state" "$disks"
    if [[ -e /run/sshd/of_testbed ]] && ! compgen -G "/run/testbed-*" >/dev/null; then  # no other bed needs it
        rm -r /run/sshd
    fi
}

up() {
    ! is_up || return 0
    down  # what a crash has left
    make_cgroups
    make_network
    make_files
    make_namespaces
    start_sshd
    touch "$state/up"
}

help() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }  # the head of this file
usage() { help >&2; exit 2; }

command=${1:-}
shift || usage
case $command:$# in
    up:0 | down:0)
        require_machine
        find_cgroup
        exec 9<"$0"  # one at a time
        flock 9
        $command
        ;;
    show:0) printf '%s\n' "name=$bed" "network=$network" "ssh_config=$state/ssh_config" "disks=$disks" ;;
    exec:0 | exec:1) usage ;;
    exec:*)
        require_machine
        require_node "$1"
        find_cgroup
        run_in "$@"
        ;;
    rate:2 | slow:2 | memory:2)
        require_machine
        find_cgroup
        if [[ $1 == all ]]; then targets=("${nodes[@]}"); else targets=("$1"); fi
        require_node "${targets[@]}"
        for target in "${targets[@]}"; do $command "$target" "$2"; done
        ;;
    own:0) usage ;;
    own:* | wipe:1)
        require_machine
        if [[ $command == own ]]; then require_node "${nodes[@]}"; else require_node "$1"; fi
        $command "$@"
        ;;
    cut:1 | join:1)
        require_machine
        require_node "$1"
        if [[ $command == cut ]]; then state_of_link=down; else state_of_link=up; fi
        ip -n "$bed-switch" link set "$1" "$state_of_link"
        ;;
    --help:*) help ;;
    *) usage ;;
esac
